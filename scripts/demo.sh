#!/usr/bin/env bash
# The demo in an environment that is installed (`make demo` does that first): fetches the model, then runs the main job.
# Options go to `python -m jdlite.evaluation.demo`; see its --help.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${VENV:-.venv}/bin/python"
if [ ! -x "$python" ]; then
  echo "there is no $python; run \`make install\` first." >&2
  exit 1
fi
exec "$python" -m jdlite.evaluation.demo "$@"
