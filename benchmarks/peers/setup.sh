#!/bin/sh
# Makes the virtual environments of the other engines and the files of SmolLM2 that they read, all under build/peers.
# Usage: setup.sh [llama_cpp] [openvino] [kvpress]; without a name, all. What stands already is left as it is.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
kvtailor=${KVTAILOR_PYTHON:-$here/../../.venv/bin/python} # a Python that kvtailor is installed in
python=${PYTHON:-python3.11}                              # makes the environments
built=${PEERS:-$here/../../build/peers}
mkdir -p "$built"

llama_cpp() {
    if [ ! -e "$built/llama_cpp/.installed" ]; then
        "$python" -m venv --clear "$built/llama_cpp"
        # There is no wheel for this version: llama.cpp is compiled, and for the processor it is compiled on. Only its
        # libraries are, without programs, tests and multimodal parts. A wheel in pip's cache may have been built otherwise.
        CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF \
-DLLAMA_BUILD_TOOLS=OFF '-DCMAKE_PROJECT_llama_cpp_INCLUDE=$here/only_llama.cmake'" \
            "$built/llama_cpp/bin/python" -m pip install --quiet --no-cache-dir \
            --no-binary llama-cpp-python -r "$here/requirements-llama-cpp.txt"
        touch "$built/llama_cpp/.installed"
    fi
    folder=$("$kvtailor" -m kvtailor.models.fetch smollm2)
    ln -sfn "$folder"/*.gguf "$built/smollm2-q4_1.gguf"
    if [ ! -e "$built/smollm2-f16.gguf" ]; then
        "$built/llama_cpp/bin/python" "$here/gguf_as_f16.py" "$built/smollm2-q4_1.gguf" "$built/unfinished.gguf"
        mv "$built/unfinished.gguf" "$built/smollm2-f16.gguf"
    fi
}

openvino() {
    if [ ! -e "$built/openvino/.installed" ]; then
        "$python" -m venv --clear "$built/openvino"
        # torch first, so that nothing else chooses its build.
        "$built/openvino/bin/python" -m pip install --quiet "$(grep '^torch==' "$here/requirements-openvino.txt")"
        "$built/openvino/bin/python" -m pip install --quiet -r "$here/requirements-openvino.txt"
        # It comes as a dependency, is not needed here, and keeps transformers from being imported beside a CPU build of
        # torch.
        "$built/openvino/bin/python" -m pip uninstall --quiet --yes torchvision
        touch "$built/openvino/.installed"
    fi
    if [ ! -d "$built/smollm2-openvino" ]; then
        rm -rf "$built/unfinished-openvino"
        folder=$("$kvtailor" -c 'from kvtailor.models.load import converted_folder; print(converted_folder("smollm2"))')
        HF_HUB_OFFLINE=1 "$built/openvino/bin/optimum-cli" export openvino --model "$folder" \
            --task text-generation-with-past --weight-format fp16 "$built/unfinished-openvino"
        mv "$built/unfinished-openvino" "$built/smollm2-openvino"
    fi
}

kvpress() {
    if [ ! -e "$built/kvpress/.installed" ]; then
        "$python" -m venv --clear "$built/kvpress"
        # torch first, so that nothing else chooses its build.
        "$built/kvpress/bin/python" -m pip install --quiet "$(grep '^torch==' "$here/requirements-kvpress.txt")"
        "$built/kvpress/bin/python" -m pip install --quiet -r "$here/requirements-kvpress.txt"
        touch "$built/kvpress/.installed"
    fi
    [ -d "$built/smollm2" ] || "$kvtailor" "$here/export_model.py" smollm2 "$built/smollm2"
}

for engine in "${@:-all}"; do
    case $engine in
    llama_cpp | openvino | kvpress) "$engine" ;;
    all)
        llama_cpp
        openvino
        kvpress
        ;;
    *)
        echo "$engine is no engine: allowed are llama_cpp, openvino and kvpress" >&2
        exit 2
        ;;
    esac
done
