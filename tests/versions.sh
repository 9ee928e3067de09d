#!/usr/bin/env bash
# Run the tests of hosts with other versions: tests/versions.sh [FOLDER], where environments are made once.
# Each line: torch, transformers, and what belongs to them.
set -u
cd "$(dirname "$0")/.."
folder=${1:-.versions}
tests="tests/integrations/test_collator.py tests/integrations/test_traps.py tests/models/test_probe.py
    tests/integrations/test_packed_trainer.py tests/ops/test_foreign_attention.py
    tests/distributed/test_trainers.py tests/distributed/test_loops.py tests/distributed/test_host_samplers.py
    tests/test_layers.py"
failed=0
while read -r name packages; do
    python="$folder/$name/bin/python"
    if [ ! -e "$folder/$name/.installed" ]; then
        "${PYTHON:-python3}" -m venv "$folder/$name" || exit 1
        # shellcheck disable=SC2086
        "$python" -m pip install -q $packages numba scipy omegaconf typer rich pytest pytest-timeout hypothesis || exit 1
        touch "$folder/$name/.installed"
    fi
    echo "== $name: $packages"
    # shellcheck disable=SC2086
    PYTHONPATH=src CUDA_VISIBLE_DEVICES="" "$python" -m pytest -q -m "not slow" $tests || failed=1
done <<'VERSIONS'
oldest torch==2.4.1 transformers==4.46.3 accelerate==1.0.1 peft==0.13.2 datasets==3.6.0 torchdata==0.10.* numpy<2.1
4.50 torch transformers==4.50.3 accelerate peft datasets==4.0.0 torchdata
4.53 torch transformers==4.53.3 accelerate peft datasets==4.0.0 torchdata
4.57 torch transformers==4.57.6 accelerate peft datasets==4.0.0 torchdata
5.0 torch transformers==5.0.0 accelerate peft datasets torchdata
5.2 torch transformers==5.2.0 accelerate peft datasets torchdata
5.10 torch transformers==5.10.4 accelerate peft datasets torchdata
newest torch transformers accelerate peft datasets torchdata trl
VERSIONS
exit $failed
