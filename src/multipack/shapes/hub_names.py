"""Names of models on the Hugging Face hub → their `model_type`, for use where no config.json is at hand."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

_NAMES = """
lfm2-*-a*b: lfm2_moe            lfm2-vl-*: lfm2_vl              lfm2-*: lfm2
apertus-*: apertus              afm-*: arcee                    trinity-*: afmoe
cerebras-gpt-*: gpt2            gpt2*: gpt2                     distilgpt2: gpt2
falcon-h1*: falcon_h1           falcon-e-*: llama               falcon*: falcon
gpt-j*: gptj                    mpt-*: mpt                      replit-*: mpt
pythia-*: gpt_neox              redpajama-incite-*: gpt_neox    gpt-neox*: gpt_neox
stablelm-*: stablelm            starcoder2-*: starcoder2        c4ai-command-r7b-*: cohere2
c4ai-command-r-*: cohere        command-r*: cohere              deepseek-v2*: deepseek_v2
deepseek-v3*: deepseek_v3       deepcoder-*: qwen2              deepseek-r1-distill-qwen-*: qwen2
deepseek-r1-distill-llama-*: llama
devstral-*: mistral             magistral-small-2507: mistral   magistral-small-25*: mistral
ministral-3-*: mistral3         ministral-8b-*: mistral         mistral-small-4-*: mistral4
mistral-small-3*: mistral       mistral-medium-3*: mistral3     mistral-*: mistral
mixtral-*: mixtral              voxtral-*: voxtral              zephyr-7b*: mistral
qwen3.5-*-a*b*: qwen3_5_moe     qwen3.5-*: qwen3_5              qwen3-next-*: qwen3_next
qwen3-*-a*b*: qwen3_moe         qwen3-*: qwen3                  qwen1.5-moe-*: qwen2_moe
qwen2*-vl-*: qwen2_vl           qwen2.5-*: qwen2                qwen2-*: qwen2
qwen1.5-*: qwen2                qwen-*: qwen                    qwq-*: qwen2
plano-*: qwen3                  skywork-reward-v2-qwen3-*: qwen3
gemma-3n-*: gemma3n             gemma-3-1b-*: gemma3_text       gemma-3-270m*: gemma3_text
gemma-3-*: gemma3               gemma-4-12b-*: gemma4_unified   gemma-4-*: gemma4
gemma-2-*: gemma2               gemma-*: gemma
glm-4-*: glm4                   glm-4.7-flash*: glm4_moe_lite   glm-4.6v*: glm4v
glm-4.5*: glm4_moe              glm-5*: glm_moe_dsa             gpt-oss-*: gpt_oss
granite-4*: granitemoehybrid    granite-*: granite              *jamba-*: jamba
llama-4-*: llama4               llama-3.2-*-vision*: mllama     llava-*: llava
*llama*: llama                  vicuna-*: llama                 yi-*: llama
smollm3*: smollm3               smollm*: llama                  olmo-2-*: olmo2
olmo-3-*: olmo3                 olmoe-*: olmoe                  nemotron-mini-*: nemotron
nvidia-nemotron-3-nano-*: nemotron_h                            nvidia-nemotron-nano-*: nemotron_h
phi-3.5-moe*: phimoe            phi-3*: phi3                    phi-4*: phi3
phi-*: phi                      seed-oss-*: seed_oss            paddleocr-vl*: paddleocr_vl
"""

_PATTERNS = re.findall(r"(\S+): (\S+)", _NAMES)


def model_type_of(name: str) -> str:
    """The `model_type` of a model by its name on the hub, such as `meta-llama/Llama-3.1-8B`; empty = unknown.

    The first pattern that matches the name without its owner, in lower case, counts.
    """
    short = name.rstrip("/").rpartition("/")[2].lower()
    return next((kind for pattern, kind in _PATTERNS if fnmatchcase(short, pattern)), "")
