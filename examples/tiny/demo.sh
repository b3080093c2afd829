#!/usr/bin/env bash
# The demo: make the tiny model, train it on this machine with every fault rehearsed, report and plot.
# Everything it writes is in examples/tiny/build, which a second demo replaces.
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)
export GRPO_ORCH_HOME=$PWD/build/home
orch=$root/.venv/bin/grpo-orch

if [ -e build/store/run.json ]; then
    "$orch" down build/store # a demo that was left running
fi
rm -rf build
"$root/.venv-node/bin/python" make_model.py --out build
"$orch" up run.yaml -y
"$orch" plot build/store --out build/plot.png
echo "The run's report again: GRPO_ORCH_HOME=$GRPO_ORCH_HOME $orch report $PWD/build/store"
