"""Drills try what no fast test can: kills at random instants, mutants of every file, full disks, lost ranks.

Each drill records what it tried and what was lost, and the summary after the tests lists both: `make drills`.
"""

import pytest


@pytest.fixture
def outcome(record_property):
    """Record a number for the summary of the drills: `outcome("kills", 50)`, `outcome("different", 0)`."""
    return lambda what, count: record_property(what, count)


def pytest_collection_modifyitems(items):
    """Only `make drills` runs these tests."""
    for item in items:
        if "drills" in item.path.parts:
            item.add_marker(pytest.mark.drill)


def pytest_terminal_summary(terminalreporter):
    """Print a line per drill: what was tried, and what was lost."""
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call" and report.user_properties
    ]
    if reports:
        terminalreporter.section("drills")
    for report in reports:
        counts = ", ".join(f"{what} {count}" for what, count in report.user_properties)
        terminalreporter.write_line(f"{report.outcome} {report.nodeid.split('::')[-1]}: {counts}")
