#!/bin/sh
# Deletes files of packages that services never read; run it in the environment after installing.
#
# These are tests, headers and CMake files of torch, static libraries, and the bytecode of model
# families in transformers; Python compiles the family in use again. With a directory as argument,
# the packages are there.
set -eu
cd "${1:-$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')}"
before=$(du -sm . | cut -f1)
rm -rf torch/test torch/include torch/share
# torch requires this program at import.
find . -path './torch/bin/*' ! -name torch_shm_manager -prune -exec rm -rf {} +
find . \( -type d -name tests -o -name '*.a' \) -prune -exec rm -rf {} +
find . -regex '\./transformers/models/[^/]*/__pycache__' ! -path '*/auto/*' -prune -exec rm -rf {} +
echo "deleted $((before - $(du -sm . | cut -f1))) MB from $PWD"
