"""Process rewards: every step of a response is scored, and the score aggregates the steps.

A step ends with a separator in the response; the model gets its own step token there instead, and
is read at it. The token is put between the tokens of the steps, since as text it could merge with
its neighbours. What is read is the probability of the good label of a token classifier.

An unfinished text is left open by default: a step is scored where it ends, so the last, unfinished
one is not scored. A text in which no step has ended counts as one step.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from reward_service.checkpoint import Network, load_head, load_model
from reward_service.conversation import (
    SPLICE,
    Tokens,
    load_conversation,
    single_token,
    without_splices,
)
from reward_service.kinds.causal import CausalReward, Head
from reward_service.specs import ProcessSpec, Resources


def load_process(spec: ProcessSpec, resources: Resources) -> CausalReward:
    """The reward of a response's steps.

    Raises:
        ValueError: the directory does not hold such a model.
    """
    model = load_model(spec, resources, heads=("score.",))
    conversation = load_conversation(spec, model.config)
    step_token = single_token(conversation.tokenizer, spec.step_token, "the step token")
    conversation.splice = step_token

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
        return tokens.spliced or [len(tokens.token_ids) - 1]  # an empty response has no step

    def score(outputs: Tensor) -> float:
        good = outputs[:, 0]
        return float({"last": good[-1], "min": good.min(), "mean": good.mean()}[spec.aggregate])

    description = f"The {spec.aggregate} of the probabilities that the response's steps are good."
    return CausalReward(
        spec,
        resources,
        description,
        model,
        _label_head(spec, resources),
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

    def head(states: Tensor) -> Tensor:
        return F.softmax(logits(states), dim=-1)[:, spec.good_label, None]

    return head
