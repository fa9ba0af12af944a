#!/bin/sh
# Install what the benchmarks compare with; run it again to mend or renew it.
#   build/mpi    MPI and FFTW from Debian's packages; numpy, mpi4py and mpi4py-fft
#   build/peers  torch as constraints.txt pins it; mpi4py, heat, pylops-mpi and torchshard
# DistDL has no package on PyPI: benchmarks/repartition_mpi.py exchanges the way it does.
set -eu
cd "$(dirname "$0")/.."

packages="openmpi-bin libopenmpi-dev libfftw3-dev"
if ! dpkg --status $packages >/dev/null 2>&1; then
    as_root=""
    [ "$(id -u)" -eq 0 ] || as_root=sudo
    $as_root apt-get update -qq
    $as_root apt-get install -y -qq --no-install-recommends $packages
fi

install() { # a virtual environment, and what goes into it
    [ -x "$1/bin/python" ] || "${PYTHON:-python3}" -m venv "$1"
    "$1/bin/pip" install --quiet --disable-pip-version-check --constraint constraints.txt $2
}

install build/mpi "numpy mpi4py mpi4py-fft"
build/mpi/bin/python -c "import mpi4py_fft.fftw, mpi4py.MPI; print(mpi4py.MPI.Get_library_version())"

# heat asks for an older torch than the pinned one, with which it works, too
install build/peers "torch torchvision numpy scipy mpi4py pylops-mpi"
install build/peers "--no-deps heat==1.8.0 torchshard==0.1.0"
build/peers/bin/python tools/mend_torchvision.py # heat imports it
build/peers/bin/python - <<'CHECK'
from importlib.metadata import version

for name in ("torch", "heat", "pylops-mpi", "torchshard"):
    print(name, version(name))
CHECK
