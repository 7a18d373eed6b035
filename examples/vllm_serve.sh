#!/bin/sh
# Serve a model in vLLM with long prompts filled, ask it both ways, measure, and stop it.
#   sh examples/vllm_serve.sh MODEL MAPS
set -eu
MODEL=$1 MAPS=$2 PORT=${PORT:-8000}
export PROMETHEUS_MULTIPROC_DIR=$(mktemp -d) VLLM_USE_V2_MODEL_RUNNER=0

python -m vllm.entrypoints.openai.api_server --model "$MODEL" --served-model-name it --port "$PORT" \
    $(ridgefill vllm-args "$MAPS" --tail 1024) &
SERVER=$!
trap 'kill $SERVER' EXIT
until curl -sf "localhost:$PORT/health"; do sleep 2; done

ask() { curl -s "localhost:$PORT/v1/completions" -H 'Content-Type: application/json' -d "$1"; echo; }
ask '{"model": "it", "prompt": "Once upon a time", "max_tokens": 32}'                                     # filled, if it is long
ask '{"model": "it", "prompt": "Once upon a time", "max_tokens": 32, "vllm_xargs": {"ridgefill": 0}}'     # off, for this one
curl -s "localhost:$PORT/metrics" | grep ^ridgefill                                                       # rows filled and exact

ridgefill bench serve "http://localhost:$PORT" --model it --tokens 4096 --users 1,2,4                     # what it gives
# roll back: start the server without the flags
