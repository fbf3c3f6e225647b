"""From what the configuration declares to the reward that it is; never guessed from a name.

Each kind is imported when it is first asked for: torch loads in the background, and not at all
for rewards without a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from reward_service import settings as specs
from reward_service.reward import Reward
from reward_service.settings import RewardSettings, RewardSpec

if TYPE_CHECKING:
    from reward_service.causal_reward import Options
    from reward_service.classifier import Transform


def load_reward(spec: RewardSpec, settings: RewardSettings) -> Reward:
    """The reward a spec describes.

    Raises:
        FileNotFoundError: a file or directory of its is not there.
        OSError, ValueError, RuntimeError: it is no such reward, or cannot be reached.
    """
    _check_files(spec)
    if isinstance(spec, specs.LocalSpec):
        return _on_a_model(spec, _options(spec, settings))
    match spec:
        case specs.RelevanceSpec():
            from reward_service.relevance import RelevanceReward

            return RelevanceReward(
                spec.directory,
                name=spec.name,
                device=settings.device,
                threads=settings.threads,
                token_budget=settings.token_budget,
            )
        case specs.FunctionSpec():
            from reward_service.function import FunctionReward

            return FunctionReward(spec.name, spec.function)
        case specs.HTTPSpec():
            from reward_service.remote_http import HTTPReward

            return HTTPReward(
                spec.name,
                spec.url,
                timeout_s=spec.timeout_s,
                headers=spec.headers,
                version=spec.version,
            )
        case specs.GRPCSpec():
            from reward_service.remote_grpc import GRPCReward

            return GRPCReward(
                spec.name,
                spec.address,
                reward=spec.reward,
                timeout_s=spec.timeout_s,
                **spec.credentials,
            )
        case _:
            from reward_service.toy import ToyReward

            return ToyReward(spec.name)


def _on_a_model(spec: specs.LocalSpec, options: Options) -> Reward:
    """Rewards on a local model of the user's."""
    match spec:
        case specs.ClassifierSpec():
            from reward_service.classifier import load_classifier

            return load_classifier(
                options,
                head=spec.head,
                adapter=spec.adapter,
                label_weights=spec.label_weights,
                transform=_transform(spec.transform),
            )
        case specs.VLLMClassifierSpec():
            from reward_service.vllm_classifier import load_vllm_classifier

            return load_vllm_classifier(
                options,
                label_weights=spec.label_weights,
                transform=_transform(spec.transform),
                vllm_options=spec.vllm_options,
            )
        case specs.CrossEncoderSpec():
            from reward_service.cross_encoder import CrossEncoderReward

            return CrossEncoderReward(options, transform=_transform(spec.transform))
        case specs.GatedSpec():
            from reward_service.gated import load_gated

            return load_gated(options, gate_at=spec.gate_at)
        case specs.LikelihoodSpec():
            from reward_service.likelihood import Likelihood, load_likelihood

            likelihood = Likelihood(beta=spec.beta, mean=spec.mean)
            return load_likelihood(options, likelihood=likelihood, reference=spec.reference)
        case specs.PairwiseSpec():
            from reward_service.pairwise import Comparison, load_pairwise

            comparison = Comparison(spec.template, spec.first, spec.second, spec.opponents)
            return load_pairwise(options, comparison=comparison)
        case specs.ProcessSpec():
            from reward_service.process import Steps, load_process

            steps = Steps(
                separator=spec.separator,
                token=spec.step_token,
                text=spec.step_text,
                good=spec.good,
                bad=spec.bad,
                good_label=spec.good_label,
                aggregate=spec.aggregate,
            )
            return load_process(options, steps=steps)
        case _:
            raise AssertionError(f"no reward is made of {type(spec)}")


def _check_files(spec: RewardSpec) -> None:
    """What is missing is told by the reward's name, not by whoever stumbles over it."""
    for option in ("directory", "head", "adapter", "reference"):
        path: Path | None = getattr(spec, option, None)
        if path and not path.exists():
            what = "model directory" if option == "directory" else option
            raise FileNotFoundError(f"reward {spec.name}: no {what} {path}")


def _transform(spec: specs.TransformSpec) -> Transform:
    from reward_service.classifier import Transform

    return Transform(spec.kind, spec.scale, spec.offset)


def _options(spec: specs.LocalSpec, settings: RewardSettings) -> Options:
    from reward_service.causal_reward import Options
    from reward_service.conversation import Format

    plain: str = getattr(spec, "format", "")
    special_tokens = getattr(spec, "special_tokens", None)
    return Options(
        name=spec.name,
        directory=spec.directory,
        device=settings.device,
        threads=settings.threads,
        token_budget=settings.token_budget,
        kept_tokens=settings.kept_tokens,
        trust_remote_code=spec.trust_remote_code,
        unfinished=getattr(spec, "unfinished", "closed"),
        format=Format(special_tokens or ("tokenizer" if plain else "template"), plain),
    )
