import os
import subprocess

import pytest

from multipack.launch.submit import SubmitRequest, batch_script, write_script

WORDS = ("train", "model=gpt2", "out=runs/my run")


def test_slurms_script():
    request = SubmitRequest(
        *("slurm", WORDS),
        nodes=2,
        processes_per_node=4,
        queue="debug",
        account="mine",
        gpus=4,
        cores=8,
        python="/p",
    )
    assert batch_script(request).splitlines() == [
        "#!/bin/bash",
        "#SBATCH --job-name=multipack",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --time=01:00:00",
        "#SBATCH --output=multipack-%j.log",
        "#SBATCH --signal=TERM@120",
        "#SBATCH --partition=debug",
        "#SBATCH --account=mine",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --cpus-per-task=8",
        "",
        'cd "$SLURM_SUBMIT_DIR"',
        "exec /p -m multipack launch -n 8 --nodes 2 --ppn 4 --cores 8 -- train model=gpt2 'out=runs/my run'",
    ]


def test_pbs_script():
    request = SubmitRequest(
        *("pbs", WORDS),
        nodes=2,
        processes_per_node=4,
        time="00:10:00",
        queue="debug",
        account="mine",
        gpus=4,
        cores=8,
        max_restarts=2,
        directives=["-l filesystems=home:eagle"],
        python="/p",
    )
    lines = batch_script(request).splitlines()
    assert lines == [
        "#!/bin/bash",
        "#PBS -N multipack",
        "#PBS -l select=2:mpiprocs=4:ncpus=32:ngpus=4",
        "#PBS -l place=scatter",
        "#PBS -l walltime=00:10:00",
        "#PBS -j oe",
        "#PBS -q debug",
        "#PBS -A mine",
        "#PBS -l filesystems=home:eagle",
        "",
        'cd "$PBS_O_WORKDIR"',
        "exec /p -m multipack launch -n 8 --nodes 2 --ppn 4 --cores 8 --max-restarts 2 --"
        " train model=gpt2 'out=runs/my run'",
    ]


def test_the_script_runs_what_it_says(tmp_path):
    """bash runs it in the folder that the job was submitted from, with the words as they were."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    script = tmp_path / "job.sh"
    write_script(SubmitRequest("slurm", WORDS, python=str(python)), script)
    done = subprocess.run(
        [script],
        env={**os.environ, "SLURM_SUBMIT_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    assert words[0] == str(tmp_path)
    assert words[-4:] == ["--", *WORDS]
    with pytest.raises(ValueError, match="exists"):
        write_script(SubmitRequest("slurm", WORDS), script)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"scheduler": "lsf"}, "--scheduler lsf.*slurm or pbs"),
        ({"words": ()}, "after --"),
        ({"time": "90m"}, "--time .90m"),
        ({"nodes": 0}, "--nodes 0"),
        ({"processes_per_node": 0}, "--ppn 0"),
        ({"queue": "a b"}, "--queue 'a b'"),
        ({"name": "x\n#SBATCH --uid=0"}, "--name"),
        ({"directives": ["a\nb"]}, "--directive"),
    ],
)
def test_bad_jobs_are_refused(more, message):
    with pytest.raises(ValueError, match=message):
        SubmitRequest(**{"scheduler": "slurm", "words": WORDS, **more})
