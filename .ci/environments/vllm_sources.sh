# The Python sources of a vLLM whose compiled parts need CUDA: its managers, tiers and policies run without them, over what
# the environment $base has installed, a vLLM for CPUs.
"$python" -m venv "$venv"
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/base.pth"
"$venv/bin/pip" download --quiet --no-deps --only-binary :all: --dest "$venv/wheel" "vllm==$release"
"$venv/bin/python" - "$venv"/wheel/*.whl "$site" <<'PYTHON'
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
wheel.extractall(sys.argv[2], [name for name in wheel.namelist() if name.startswith("vllm/") and name.endswith(".py")])
PYTHON
rm -r "$venv/wheel"
mkdir "$site/vllm-$release+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$release" >"$site/vllm-$release+cpu.dist-info/METADATA"
