"""Process rewards: every step of a response is scored, and the score aggregates the steps.

A step ends with a separator in the response; the model gets its own step token there instead, and
is read at it. The token is put between the tokens of the steps, since as text it could merge with
its neighbours; models that were trained on whole texts get it as text. What is read is the
probability of the good label of a token classifier, or of the good word against the bad one of a
language model (Math-Shepherd, arXiv 2312.08935).

An unfinished text is left open by default: a step is scored where it ends, so the last, unfinished
one is not scored. A text in which no step has ended counts as one step.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM

from reward_service.checkpoint import Network, load_head, load_model
from reward_service.conversation import (
    SPLICE,
    Tokens,
    Turns,
    load_conversation,
    single_token,
    without_splices,
)
from reward_service.kinds.causal import CausalReward, Head
from reward_service.kinds.lm_head import LMHead
from reward_service.specs import ProcessSpec, Resources
from specrej.contracts import Prompt


def load_process(spec: ProcessSpec, resources: Resources) -> CausalReward:
    """The reward of a response's steps.

    Raises:
        ValueError: the directory does not hold such a model.
    """
    auto_class = AutoModelForCausalLM if spec.good else AutoModel
    model = load_model(spec, resources, auto_class, heads=() if spec.good else ("score.",))
    conversation = load_conversation(spec, model.config)
    tokenizer = conversation.tokenizer
    step_token = single_token(tokenizer, spec.step_token, "the step token")
    conversation.splice = spec.step_text or step_token

    def prepare(text: str, closed: bool) -> str:
        """Each ended step, followed by SPLICE, then the rest. The rest counts as ended if the text
        is closed or has no other step."""
        *ended, rest = without_splices(text).split(spec.separator)
        ended = [step for step in ended if step.strip()]
        if rest.strip() and (closed or not ended):
            ended, rest = [*ended, rest], ""
        return "".join(step + SPLICE for step in ended) + rest

    def marks(tokens: Tokens) -> list[int]:
        """The step tokens."""
        places = tokens.spliced
        if spec.step_text:
            response = range(tokens.start, len(tokens.token_ids))
            places = [i for i in response if tokens.token_ids[i] == step_token]
        return places or [len(tokens.token_ids) - 1]  # an empty response has no step

    def score(outputs: Tensor) -> float:
        good = outputs[:, 0]
        return float({"last": good[-1], "min": good.min(), "mean": good.mean()}[spec.aggregate])

    text = prepare(f"One is one.{spec.separator}Two is two.", True)
    (tokens,) = Turns(conversation, Prompt.from_user("Count.")).tokenize([(text, True)])
    if len(marks(tokens)) != 2:
        reason = "the step token is not found in whole texts: leave out step_text, or write it so"
        raise ValueError(f"{spec.directory}: {reason} that it stays one token")
    if spec.good:
        pair = [single_token(tokenizer, word, "the word") for word in (spec.good, spec.bad)]
        head = LMHead(model).preferring(pair)
    else:
        head = _label_head(spec, resources)
    description = f"The {spec.aggregate} of the probabilities that the response's steps are good."
    return CausalReward(
        spec,
        resources,
        description,
        model,
        head,
        score,
        marks=marks,
        prepare=prepare,
        conversation=conversation,
    )


def _label_head(spec: ProcessSpec, resources: Resources) -> Head:
    """A linear head, or two layers with a ReLU between (Qwen2.5-Math-PRM, arXiv 2501.07301)."""
    logits = Network(load_head(spec.directory, "score", device=resources.device))
    if spec.good_label >= logits.num_outputs:
        reason = f"has {logits.num_outputs} labels, none is {spec.good_label}"
        raise ValueError(f"{spec.directory}: {reason}")

    def head(states: Tensor, _: Tensor) -> Tensor:
        return F.softmax(logits(states), dim=-1)[:, spec.good_label, None]

    return head
