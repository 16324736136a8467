#!/usr/bin/env bash
# Creates one virtual environment per peer in $PEERS_DIR (default: build/peers). Safe to run again.
# PYTHON: interpreter to use (3.11). TORCH: which PyTorch (default torch==2.13.0, as anybit's Makefile).
# PIP_ARGS: passed to every pip install, for example to choose an index with CPU builds.
set -euo pipefail

PEERS_DIR=${PEERS_DIR:-build/peers}
PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-torch==2.13.0}
PIP_ARGS=${PIP_ARGS:-}

# pip_install ENVIRONMENT ARGUMENT...
pip_install() {
  local environment=$1
  shift
  # shellcheck disable=SC2086  # PIP_ARGS holds several words
  "$PEERS_DIR/$environment/bin/python" -m pip install --quiet $PIP_ARGS "$@"
}

create() {
  "$PYTHON" -m venv "$PEERS_DIR/$1"
  pip_install "$1" "$TORCH" # first and alone: the peers' own requirements would pick another build
}

create gptqmodel
# Its requirements by hand, because it asks for torch>=2.14.1 although it runs on 2.13.
pip_install gptqmodel "$TORCH" setuptools==84.2.1 wheel numpy==2.4.6 accelerate==1.15.0 safetensors==0.8.0 \
  transformers==5.23.0 datasets==5.2.0 torchao==0.18.0 tokenicer==0.0.14 defuser==0.0.28 device-smi==0.5.7 \
  logbar==0.4.15 pypcre==0.6.4 threadpoolctl filelock packaging protobuf pillow requests jinja2 ninja maturin \
  pyarrow dill
pip_install gptqmodel --no-deps --no-build-isolation gptqmodel==7.7.0

create llmcompressor
pip_install llmcompressor "$TORCH" llmcompressor==0.14.0.1

create autoround
pip_install autoround "$TORCH" auto-round==0.16.1

for peer in gptqmodel llmcompressor; do
  "$PEERS_DIR/$peer/bin/python" -c "
import importlib.metadata as m, sys
print(sys.argv[1], m.version(sys.argv[1]), 'torch', m.version('torch'), 'transformers', m.version('transformers'))" "$peer"
done
