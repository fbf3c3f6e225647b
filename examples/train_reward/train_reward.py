"""Train a reward model on preference pairs with TRL and PEFT, for the reward service to serve.

Reads JSON lines of {"prompt", "chosen", "rejected"}, each a list of messages: the format of TRL.
Trains low-rank adapters and a head on a causal model, merges
them, and saves a directory that a reward of kind `classifier` loads. Needs the packages of
requirements.txt.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig, TaskType
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer


def main() -> None:
    """Print one JSON object: accuracy, loss and mean margin on held-out pairs, before and after."""
    options = _options()
    tokenizer: Any = AutoTokenizer.from_pretrained(options.backbone)
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        options.backbone, num_labels=1, dtype=torch.float32
    )
    pairs = load_dataset("json", data_files=str(options.pairs), split="train")
    pairs = pairs.select_columns(["prompt", "chosen", "rejected"])
    divided = pairs.train_test_split(options.held_out, seed=0)
    trainer = RewardTrainer(
        model=model,
        args=_settings(options),
        train_dataset=divided["train"],
        eval_dataset=divided["test"],
        processing_class=tokenizer,
        # TRL trains the head, `score`, beside the adapters.
        peft_config=LoraConfig(
            r=options.rank,
            lora_alpha=2 * options.rank,
            target_modules="all-linear",
            task_type=TaskType.SEQ_CLS,
            modules_to_save=["score"],
        ),
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    # The reward service reads plain weights: adapters are added to them, which costs no time later.
    trainer.model.merge_and_unload().save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    measured = {
        when: {name: found[f"eval_{name}"] for name in ("accuracy", "loss", "margin")}
        for when, found in (("before", before), ("after", after))
    }
    print(json.dumps(measured))


def _settings(options: argparse.Namespace) -> RewardConfig:
    return RewardConfig(
        output_dir=str(options.out / "checkpoints"),
        num_train_epochs=options.epochs,
        learning_rate=options.learning_rate,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        max_length=options.max_tokens,
        seed=0,
        save_strategy="no",
        report_to="none",
        logging_steps=10,
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        # Computing activations twice would save memory that a small model does not need.
        activation_checkpointing=False,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("pairs", type=Path, help="JSON lines of prompt, chosen and rejected")
    parser.add_argument("out", type=Path, help="directory of the reward model")
    parser.add_argument("--backbone", type=Path, default=Path(".models/SmolLM2-135M-Instruct"))
    parser.add_argument("--held-out", type=int, default=100, help="pairs for the accuracy")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--max-tokens", type=int, default=1024, help="longer pairs are left out")
    parser.add_argument("--batch", type=int, default=8, help="pairs of a step")
    options = parser.parse_args()
    if not options.pairs.is_file():
        sys.exit(f"no file {options.pairs}")
    return options


if __name__ == "__main__":
    main()
