# Two commands: `make demo` runs the main job, `make test` passes the tests. Each sets up its own environment.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
OLDEST := .venv-oldest
NATIVE := CMakeLists.txt $(wildcard native/*)

# Spinning OpenMP threads slow everything down as soon as a core is busy.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: demo test test-oldest sanitize emulate-avx512 lint models clean

demo: $(INSTALLED)
	$(BIN)/kvtailor demo --out out

test: $(INSTALLED) models
	$(BIN)/pytest

# The contract with Transformers, on the oldest release that is served. The kernels in src/ are those that $(VENV) built.
test-oldest: $(INSTALLED) $(OLDEST)/.installed
	$(OLDEST)/bin/pytest tests/test_contract.py tests/test_full_retention.py tests/test_attach.py

# Installs the package with its kernels built in another way into a folder of its own; PYTHONPATH puts it before src/.
define install-beside
	rm -rf build/$@/installed
	$(BIN)/python -m pip install --quiet --no-deps --target build/$@/installed \
		--config-settings=build-dir=build/$@/cmake --config-settings=install.strip=false \
		--config-settings=cmake.define.$(1)=ON .
	ls build/$@/installed/kvtailor/kernels/_native*
endef

# libstdc++ is preloaded as well, because the sanitizer looks for its throw at the start; it reports past pytest, which would
# lose what it captures when the process ends.
sanitize: $(INSTALLED)
	$(call install-beside,KVTAILOR_SANITIZE)
	PYTHONPATH=$(CURDIR)/build/$@/installed ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		$(BIN)/pytest --capture=sys tests/test_native.py tests/test_native_packing.py tests/test_native_retrieval.py

emulate-avx512: $(INSTALLED)
	$(call install-beside,KVTAILOR_EMULATE_AVX512)
	PYTHONPATH=$(CURDIR)/build/$@/installed KVTAILOR_KERNELS=avx512 $(BIN)/pytest tests/test_native.py tests/test_native_packing.py tests/test_native_retrieval.py

lint: $(INSTALLED)
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports

models: $(INSTALLED)
	$(BIN)/python -m kvtailor.models.fetch

$(INSTALLED): pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt \
		--config-settings=wheel.cmake=false --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) out build dist src/kvtailor/kernels/_native*.so
