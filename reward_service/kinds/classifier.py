"""Sequence classifiers: Bradley-Terry models, and regression heads with several labels.

The score is the head's output at the end of the conversation: one label's logit, or a weighted sum
of several, then transformed as declared. The head is linear or has several layers, or it is one
token's row of a language model's head.

transformers' own classifiers, whose head is `score`, read the last token that is not padding; the
code that comes with other heads reads the last token (Eurus-RM, UltraRM, GRM, InternLM2-Reward).

An unfinished text is closed by default: these models were trained on whole conversations, and their
reward is read at the tokens that close the last turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import AutoModelForCausalLM

from reward_service.checkpoint import HEAD_TENSOR, Network, load_head, load_model
from reward_service.conversation import load_conversation, single_token
from reward_service.kinds.causal import CausalReward, Head
from reward_service.kinds.lm_head import LMHead
from reward_service.specs import ClassifierSpec, LabelledSpec, Resources
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


def weighted(spec: LabelledSpec, logits: Sequence[float]) -> float:
    """The score of one text, from a logit per label."""
    if spec.label is not None:
        return spec.transform(logits[spec.label])
    pairs = zip(logits, spec.label_weights, strict=True)
    return spec.transform(sum(logit * weight for logit, weight in pairs))


def load_classifier(spec: ClassifierSpec, resources: Resources) -> CausalReward:
    """A decoder-only model with a head: one of the checkpoint, by its name; one in a file of its
    own; or a row of the language model's.

    Raises:
        ValueError: the directory does not hold such a model; the message says why.
    """
    pad_id = None
    if spec.logit_of is None:
        network = _network(spec, resources.device)
        model = load_model(spec, resources, heads=("score." if spec.head_file else spec.head,))
        config = model.config.get_text_config()
        if network.num_inputs != config.hidden_size:
            reason = f"has {network.num_inputs} inputs, the backbone {config.hidden_size}"
            raise ValueError(f"{spec.head_file or spec.directory}: the head {reason}")
        conversation = load_conversation(spec, model.config)
        head: Head = lambda states, _: network(states)  # noqa: E731
        if not (spec.head_file or spec.head != "score" or conversation.appended):
            pad_id = config.pad_token_id
    else:
        model = load_model(spec, resources, AutoModelForCausalLM)
        conversation = load_conversation(spec, model.config)
        token = single_token(conversation.tokenizer, spec.logit_of, "logit_of")
        head = LMHead(model).logits_of([token])
    file = fingerprint.of_file(spec.head_file) if spec.head_file else ""
    return CausalReward(
        spec,
        resources,
        "A reward model's logit for the response as the assistant's turn.",
        model,
        head,
        lambda outputs: weighted(spec, outputs[-1].tolist()),
        marks=lambda tokens: [num_read(tokens.token_ids, pad_id) - 1],
        conversation=conversation,
        digests={"padding": str(pad_id), "head_file": file},
    )


def _network(spec: ClassifierSpec, device: str) -> Network:
    """Raises ValueError: there is no such head, or it has another number of labels."""
    source, name = spec.directory, spec.head
    if spec.head_file:
        source, name = spec.head_file, HEAD_TENSOR
    tensors = load_head(source, name, device)
    try:
        network = Network(tensors, spec.head_layers)
    except ValueError as error:
        raise ValueError(f"{source}: {name}: {error}") from None
    check_labels(spec, network.num_outputs)
    return network


def check_labels(spec: LabelledSpec, num_labels: int) -> None:
    """Raises ValueError unless the label, or a weight for each label, is there."""
    if spec.label is not None:
        reason = f"none is {spec.label}" if spec.label >= num_labels else ""
    else:
        num_weights = len(spec.label_weights)
        reason = f"label_weights has {num_weights} of them" if num_weights != num_labels else ""
    if reason:
        raise ValueError(f"{spec.directory}: has {num_labels} labels, {reason}")
