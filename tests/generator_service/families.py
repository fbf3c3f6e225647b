"""Tiny random models of the families that the engine computes, and of some that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import GenerationConfig

from tests.generator_service import tiny
from tests.reward_service.tiny import make_tokenizer

END, END_OF_TURN = 2, 5  # of a text, and of a turn: generation_config.json has both
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}<a>"

_SIZES: dict[str, Any] = tiny._SIZES | {"vocab_size": 259}
_BY_HEADS = {key: value for key, value in _SIZES.items() if key != "head_dim"}
_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SCALED_QUERIES = {  # from token 16 on
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.5,
}
_SCALED = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GEMMA_3 = _SIZES | {"sliding_window": 12, "sliding_window_pattern": 2}
_VISION = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}
_COMPRESSED = {
    **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 4},
}

# The family, as docs/configuration.md names it: the name of its config's class, and its options.
SUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("LlamaConfig", _SIZES | {"num_key_value_heads": 4}),
    "Llama 3": ("LlamaConfig", _SIZES | {"rope_parameters": _LLAMA_3_ROPE}),
    "Mistral": ("MistralConfig", _SIZES | {"sliding_window": 12}),
    "Ministral 3 (checkpoints of text alone)": (
        "Ministral3Config",
        _SIZES | {"rope_parameters": _SCALED_QUERIES},
    ),
    "Qwen2, Qwen2.5": ("Qwen2Config", _SIZES),
    "Qwen3": ("Qwen3Config", _SIZES),
    "Gemma 2": ("Gemma2Config", _SIZES | {"sliding_window": 12}),
    "Gemma 3": ("Gemma3TextConfig", _GEMMA_3),
    "Gemma 3 with images (text alone)": (
        "Gemma3Config",
        {"text_config": {"num_hidden_layers": 3, **_GEMMA_3}, "vision_config": _VISION}
        | {"image_token_index": 250, "boi_token_index": 251, "eoi_token_index": 252},
    ),
    "Phi-3": ("Phi3Config", _BY_HEADS | {"sliding_window": 12}),
    "Phi-4": ("Phi3Config", _BY_HEADS | {"partial_rotary_factor": 0.75}),
    "OLMo 2": ("Olmo2Config", _SIZES),
    "SmolLM2": ("LlamaConfig", _SIZES | {"tie_word_embeddings": True}),
    "SmolLM3": ("SmolLM3Config", _SIZES | {"no_rope_layers": [1, 1, 0]}),
    "Granite": ("GraniteConfig", _SIZES | _SCALED),
}
# And a part of the reason.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "GPT-OSS": ("GptOssConfig", _SIZES | _EXPERTS, "attention sinks are not supported"),
    "DeepSeek-V3": ("DeepseekV3Config", _BY_HEADS | _COMPRESSED, "different sizes"),
    "Bloom": ("BloomConfig", {"vocab_size": 259, "hidden_size": 32, "n_head": 4}, "is its own"),
    "Falcon": (
        "FalconConfig",
        {"vocab_size": 259, "hidden_size": 32, "num_attention_heads": 4},
        "is its own",
    ),
    "Mamba": ("MambaConfig", {"vocab_size": 259, "hidden_size": 32}, "layers of kind linear"),
    "Qwen3-Next": ("Qwen3NextConfig", _SIZES | _EXPERTS, "layers of kind linear_attention"),
    "Llama 4": ("Llama4TextConfig", _SIZES | {"num_local_experts": 2}, "chunked_attention"),
    "T5": ("T5Config", {"vocab_size": 259, "d_model": 32}, "not a causal language model"),
}


def save(name: str, directory: Path) -> Path:
    """A directory with a model of the family, a tokenizer, a chat template and two end tokens."""
    options: dict[str, Any]
    kind, options = (SUPPORTED.get(name) or REFUSED[name])[:2]
    config = getattr(transformers, kind)(**{"num_hidden_layers": 3, **options})
    if name == "T5":
        config.save_pretrained(directory)
        return directory
    model = tiny.of_config(config)
    model.generation_config = GenerationConfig(eos_token_id=[END, END_OF_TURN], bos_token_id=1)
    model.save_pretrained(directory)
    tokenizer = make_tokenizer(None)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory
