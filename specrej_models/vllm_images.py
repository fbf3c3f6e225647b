"""Images of prompts, for a vLLM in this process; by its public interfaces only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from vllm.inputs import TokensPrompt

from specrej.contracts import Image
from specrej.contracts.errors import InvalidRequest, Violation
from specrej.images import checked, opened

log = logging.getLogger(__name__)


class PromptImages:
    """The images of a prompt, by their paths in errors; `ids`: its tokens, one for each image.

    An image's name is a digest of the tenant's salt and the file. vLLM decodes, processes and
    encodes an image of a name that it does not have, once for all requests.
    """

    def __init__(
        self, llm: Any, images: Mapping[str, Image], salt: str = "", ids: Sequence[int] = ()
    ) -> None:
        """llm: an `AsyncLLMEngine`."""
        self._renderer = llm.renderer
        self._images, self._salt, self._ids = images, salt, ids
        key = salt.encode()
        self._names = [sha256(key + b" " + image.data).hexdigest() for image in images.values()]

    async def rendered(self, token_ids: Sequence[int] = (), **options: Any) -> Any:
        """vLLM's input: the prompt with all tokens of its images, and the tokens after it."""
        images = [opened(image, "prompt", decodes=False) for image in self._images.values()]
        prompt = TokensPrompt(
            prompt_token_ids=[*self._ids, *token_ids],
            multi_modal_data={"image": images},
            multi_modal_uuids={"image": self._names},
        )
        if self._salt:
            prompt["cache_salt"] = self._salt
        (rendered,) = await self._renderer.render_cmpl_async([prompt], **options)
        return rendered

    async def counted(self, token_ids: Sequence[int] = ()) -> Sequence[int]:
        """All tokens of the input, once the images are checked.

        Raises:
            InvalidRequest: the model cannot read them.
        """
        await asyncio.to_thread(checked, self._images)
        try:
            # Not by the cache of requests: the engine would have to receive what that returns.
            rendered = await self.rendered(token_ids, skip_mm_cache=True)
        except ValueError as error:  # too many, or too large for the model
            log.info("images are refused: %s", error)
            text = "the model's processor refuses the images"
            raise InvalidRequest([Violation(path, text) for path in self._images]) from error
        all_ids: Sequence[int] = rendered["prompt_token_ids"]
        return all_ids


def takes_images(llm: Any) -> bool:
    """Whether the model has a processor of images, and the options allow one."""
    if not llm.vllm_config.model_config.supports_multimodal_inputs:
        return False
    limits = llm.renderer.get_mm_processor().info.allowed_mm_limits
    return bool(limits.get("image"))
