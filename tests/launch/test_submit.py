import os
import subprocess

import pytest

from multipack.launch.submit import SubmitRequest, batch_script, write_script

WORDS = ("train", "model=gpt2", "out=runs/my run")
SLURM = """#!/bin/bash
#SBATCH --job-name=multipack
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --time=00:10:00
#SBATCH --output=multipack-%j.log
#SBATCH --signal=TERM@120
#SBATCH --partition=debug
#SBATCH --account=mine
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH -x

cd "$SLURM_SUBMIT_DIR"
"""
PBS = """#!/bin/bash
#PBS -N multipack
#PBS -l select=2:mpiprocs=4:ncpus=32:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=00:10:00
#PBS -j oe
#PBS -q debug
#PBS -A mine
#PBS -x

cd "$PBS_O_WORKDIR"
"""


@pytest.mark.parametrize(("scheduler", "header"), [("slurm", SLURM), ("pbs", PBS)])
def test_scripts(scheduler, header):
    sizes = {"nodes": 2, "processes_per_node": 4, "gpus": 4, "cores": 8}
    names = {"time": "00:10:00", "queue": "debug", "account": "mine", "directives": ["-x"], "python": "/p"}
    launch = "/p -m multipack launch -n 8 --nodes 2 --ppn 4 --cores 8"
    script = batch_script(SubmitRequest(scheduler, WORDS, **sizes, **names))
    assert script == f"{header}exec {launch} -- train model=gpt2 'out=runs/my run'\n"


def test_the_script_runs_in_the_folder_of_submission(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    script = tmp_path / "job.sh"
    write_script(SubmitRequest("slurm", WORDS, python=str(python)), script)
    environment = {**os.environ, "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run([script], env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[0] == str(tmp_path)
    assert words[-4:] == ["--", *WORDS]
    with pytest.raises(ValueError, match="exists"):
        write_script(SubmitRequest("slurm", WORDS), script)


def test_bad_jobs_are_refused():
    for more, named in (
        ({"scheduler": "lsf"}, "--scheduler lsf.*slurm or pbs"),
        ({"words": ()}, "after --"),
        ({"time": "90m"}, "--time '90m'"),
        ({"nodes": 0}, "--nodes 0"),
        ({"processes_per_node": 0}, "--ppn 0"),
        ({"queue": "a b"}, "--queue 'a b'"),
        ({"name": "x\n#SBATCH --uid=0"}, "--name"),
        ({"directives": ["a\nb"]}, "--directive"),
    ):
        with pytest.raises(ValueError, match=named):
            SubmitRequest(**{"scheduler": "slurm", "words": WORDS, **more})
