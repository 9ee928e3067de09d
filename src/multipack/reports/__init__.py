"""Output for people: the console, tables and pictures of plans, reports of runs as text and pages."""
