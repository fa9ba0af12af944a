#!/bin/sh
# Install what benchmarks/fft.py compares with: MPI and FFTW from Debian's packages, and mpi4py-fft
# in a virtual environment of its own, build/mpi. Run it again to mend or renew them.
set -eu
cd "$(dirname "$0")/.."

packages="openmpi-bin libopenmpi-dev libfftw3-dev"
if ! dpkg --status $packages >/dev/null 2>&1; then
    as_root=""
    [ "$(id -u)" -eq 0 ] || as_root=sudo
    $as_root apt-get update -qq
    $as_root apt-get install -y -qq --no-install-recommends $packages
fi
[ -x build/mpi/bin/python ] || "${PYTHON:-python3}" -m venv build/mpi
build/mpi/bin/pip install --quiet --disable-pip-version-check numpy mpi4py mpi4py-fft
build/mpi/bin/python -c "import mpi4py_fft.fftw, mpi4py.MPI; print(mpi4py.MPI.Get_library_version())"
