"""Sequence classifiers: Bradley-Terry models, and regression heads with several labels.

The score is the head's output at the conversation's last token that is not padding: one
label's logit, or a weighted sum of several, then transformed as declared.

An unfinished text is closed by default: these models were trained on whole conversations, and their
reward is read at the tokens that close the last turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from reward_service.checkpoint import HEAD_TENSOR, load_head, load_model
from reward_service.kinds.causal import CausalReward
from reward_service.specs import ClassifierSpec, Resources, VLLMClassifierSpec
from specrej import fingerprint


def num_read(token_ids: Sequence[int], pad_id: int | None) -> int:
    """How many tokens there are up to the last one that is not padding, at least 1.

    Heads are trained on this token (`GenericForSequenceClassification` of transformers). If the end
    token is the padding token, it is not counted either.
    """
    length = len(token_ids)
    while length > 1 and token_ids[length - 1] == pad_id:
        length -= 1
    return length


def weighted(spec: ClassifierSpec | VLLMClassifierSpec, logits: Sequence[float]) -> float:
    """The score of one text, from a logit per label."""
    pairs = zip(logits, spec.label_weights, strict=True)
    return spec.transform(sum(logit * weight for logit, weight in pairs))


def load_classifier(spec: ClassifierSpec, resources: Resources) -> CausalReward:
    """A decoder-only model with `score.weight` [labels, hidden] on its last token, or a backbone
    with a head's file.

    Raises:
        ValueError: the directory does not hold such a model; the message says why.
    """
    weight, bias = _head(spec, resources.device)
    model = load_model(spec, resources)
    if weight.shape[1] != model.config.hidden_size:
        shape, hidden = [*weight.shape][1:], model.config.hidden_size
        source = spec.head or spec.directory
        raise ValueError(f"{source}: a head of {shape}, the backbone has {hidden}")
    # A head that `training` has fitted reads the last token.
    pad_id = None if spec.head else model.config.get_text_config().pad_token_id
    digests = {"padding": str(pad_id), "head": fingerprint.of_file(spec.head) if spec.head else ""}
    return CausalReward(
        spec,
        resources,
        "A reward model's logit for the response as the assistant's turn.",
        model,
        lambda states, _: F.linear(states.float(), weight, bias),
        lambda outputs: weighted(spec, outputs[-1].tolist()),
        marks=lambda tokens: [num_read(tokens.token_ids, pad_id) - 1],
        digests=digests,
    )


def _head(spec: ClassifierSpec, device: str) -> tuple[Tensor, Tensor | None]:
    """Weight [labels, hidden] and bias [labels].

    Raises:
        ValueError: there is no head, or it has another number of labels.
    """
    if spec.head:
        return load_head(spec.head, HEAD_TENSOR, device)[""][None], None
    weight = load_head(spec.directory, "score.weight", device)[""]
    check_labels(spec, len(weight))
    return weight, load_head(spec.directory, "score.", device).get("bias")


def check_labels(spec: ClassifierSpec | VLLMClassifierSpec, num_labels: int) -> None:
    """Raises ValueError unless there is a weight for each label."""
    num_weights = len(spec.label_weights)
    if num_weights != num_labels:
        raise ValueError(
            f"{spec.directory}: has {num_labels} labels, label_weights has {num_weights} of them"
        )
