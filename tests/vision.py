"""A tiny random model of images and texts, of Qwen2-VL's class, with bytes as tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from tests.reward_service.tiny import make_tokenizer

CONTEXT = 512
SIDE = 56  # of an image that is not resized
IMAGE_TOKENS = 4 + 2  # of such an image, with the two around it
_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_ENDS = ("<end>", "<over>", "<out>")
# As Qwen2-VL's own.
_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_vision_model(directory: Path) -> Path:
    """The model's directory, as of a published one."""
    tokenizer: Any = make_tokenizer("<pad>", bos=False)
    tokenizer.add_special_tokens({"additional_special_tokens": [*_ENDS, *_MARKS]})
    tokenizer.chat_template = _TEMPLATE
    start, end, image, video = (tokenizer.convert_tokens_to_ids(mark) for mark in _MARKS)
    ends = [2, *(tokenizer.convert_tokens_to_ids(mark) for mark in _ENDS)]
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT, "eos_token_id": ends, "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]
        },
    }  # fmt: skip
    vision = {
        "depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    }  # fmt: skip
    config: Any = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        eos_token_id=ends,
        tie_word_embeddings=False,
    )
    torch.manual_seed(7)
    model = Qwen2VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # wide enough apart that tokens differ
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _save_processor(directory)
    return directory


def save_vision_classifier(directory: Path) -> Path:
    """The same model with a head of one label."""
    config = json.loads((save_vision_model(directory) / "config.json").read_text())
    config |= {"architectures": ["Qwen2VLForSequenceClassification"], "num_labels": 1}
    config |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(directory / "model.safetensors")
    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(8))
    del weights["lm_head.weight"]
    weights |= {"language_model.score.weight": head}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def _save_processor(directory: Path) -> None:
    options = {
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor",
        "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 28 * 28,
        "max_pixels": 112 * 112, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25],
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(options))
    video = {**options, "video_processor_type": "Qwen2VLVideoProcessor"}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
