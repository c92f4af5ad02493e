#!/bin/sh
# Find a working Python 3.12 and let it install this project: sh tools/bootstrap.sh [EXTRA...]
# In: the machine as it is. Out: .venv, by tools/install.py. Needs a POSIX shell and nothing else.
# FP8RL_PYTHON names the interpreter to use.
set -eu
cd "$(dirname "$0")/.."

probe="import sys, ensurepip, ssl, venv; print(sys.version_info[:2])"
works() {
    # A name on the PATH may be a shim for a version that is not installed, so each candidate has to run.
    [ -x "$1" ] && [ "$("$1" -c "$probe" 2>/dev/null)" = "(3, 12)" ]
}

candidates() {
    echo "${FP8RL_PYTHON:-}"
    echo .venv/bin/python
    # Every folder of the PATH, since a broken shim may stand before a python that works.
    echo "$PATH" | tr ':' '\n' | while read -r folder; do
        for name in python3.12 python3 python; do echo "$folder/$name"; done
    done
    for root in "${PYENV_ROOT:-}" "$HOME/.pyenv" /opt/pyenv /usr/local/pyenv; do
        ls -d "$root"/versions/3.12*/bin/python3.12 2>/dev/null || :
    done
    ls -d "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"/cpython-3.12*/bin/python3.12 2>/dev/null || :
    for root in "${CONDA_PREFIX:-}" "${MAMBA_ROOT_PREFIX:-}" "$HOME"/miniconda3 "$HOME"/anaconda3 "$HOME"/miniforge3 \
        "$HOME"/mambaforge "$HOME"/micromamba "$HOME"/.conda /opt/conda /opt/miniconda3 /opt/miniforge3; do
        ls -d "$root"/bin/python3.12 "$root"/envs/*/bin/python3.12 2>/dev/null || :
    done
    ls -d "$HOME"/.asdf/installs/python/3.12*/bin/python3.12 "$HOME"/.local/bin/python3.12 \
        "$HOME"/.local/share/mise/installs/python/3.12*/bin/python3.12 /usr/local/bin/python3.12 /usr/bin/python3.12 \
        /usr/local/*/bin/python3.12 /opt/homebrew/bin/python3.12 /opt/*/bin/python3.12 /opt/python/*/bin/python3.12 \
        2>/dev/null || :
}

python=$(candidates | while read -r candidate; do
    if [ -n "$candidate" ] && works "$candidate"; then
        echo "$candidate"
        break
    fi
done)

if [ -n "${FP8RL_PYTHON:-}" ] && [ "$python" != "$FP8RL_PYTHON" ]; then
    echo "FP8RL_PYTHON=$FP8RL_PYTHON is not a Python 3.12 with ensurepip, ssl and venv." >&2
    exit 1
fi
if [ -z "$python" ]; then
    echo "Python 3.12 was not found: run 'uv python install 3.12', 'pyenv install 3.12'," \
        "'conda create -n py312 python=3.12' or 'apt install python3.12-venv'," \
        "or name one with FP8RL_PYTHON=/path/to/python3.12." >&2
    exit 1
fi
exec "$python" tools/install.py "$@"
