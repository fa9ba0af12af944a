# `make demo` and `make test` need only Python (3.11 or later, with venv), git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ZOO := $(VENV)/.zoo
# Tests start interpreters, each of which would compile the package, and pytest its tests, where
# this is set: keep what was compiled.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-quick soak sanitize venv bench lint format types docs pictures support zoo clean

demo: $(READY)
	$(BIN)/tessel demo

test: $(READY)
	$(BIN)/pytest -n 2 --dist worksteal -m "not alone"
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m alone # they wait for much of their time

test-quick: $(READY)
	$(BIN)/pytest --quick -n 2 --dist worksteal -m "not alone"

soak: $(READY)
	$(BIN)/python tools/soak.py --minutes $(or $(MINUTES),60)

sanitize: $(READY)
	$(BIN)/python tools/sanitize.py

venv: $(READY)

bench: $(READY)
	PYTHON=$(PYTHON) benchmarks/setup_peers.sh
	$(BIN)/tessel bench $(CLAIMS)

$(READY): pyproject.toml setup.py constraints.txt src/tessel/transport/engine.c src/tessel/transport/constants.py src/tessel/tensor/loops.c src/tessel/tensor/moments.h tools/mend_torchvision.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[viz,test,lint]'
	$(BIN)/python tools/mend_torchvision.py # deepinv needs torchvision, whose wheels need CUDA's torch
	touch $(READY)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy
	$(BIN)/mypy --strict tests/typed_user.py # what users see of the types

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

support: $(READY)
	$(BIN)/python tests/tensor/support.py

# models of other packages, and docs/zoo.md; PACKAGE=timm for those of one; and what `make test` skips
# without these packages
zoo: $(ZOO)
	rm -rf build/zoo
	$(BIN)/pytest -m zoo -n 2 --dist worksteal tests/zoo $(if $(PACKAGE),-k '[$(PACKAGE):'); status=$$?; \
	$(BIN)/python tests/zoo/zoo_page.py && exit $$status
	$(if $(PACKAGE),,$(BIN)/pytest -n 2 --dist worksteal tests/test_example_scripts.py tests/nn/test_model_uses.py \
		-k 'accelerate or lightning or llama or segment or vae')

$(ZOO): $(READY)
	# torch_harmonics is compiled for the torch that is here: without isolation no other one is fetched
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--no-build-isolation --editable '.[zoo]'
	$(BIN)/python tools/mend_torchvision.py
	touch $(ZOO)

pictures: $(READY)
	$(BIN)/python tools/draw_pictures.py

clean:
	rm -rf $(VENV) site build dist
