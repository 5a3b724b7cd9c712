"""The processor of Pixtral and Mistral 3 (arXiv 2410.07073): transformers' own module needs
torchvision. Used by `frame.plugins.modalities.processor`."""

from __future__ import annotations

from typing import Any


def make_pixtral_processor() -> type:
    """A processor class without text: rows of image tokens, each with a token at its end."""
    from transformers.processing_utils import ProcessorMixin

    class PixtralProcessor(ProcessorMixin):
        def __init__(
            self,
            image_processor: Any = None,
            tokenizer: Any = None,
            patch_size: int = 16,
            spatial_merge_size: int = 1,
            image_token: str = "[IMG]",  # noqa: S107
        ) -> None:
            super().__init__(image_processor, tokenizer)
            self.side = patch_size * spatial_merge_size  # pixels of a token
            self.image_token = image_token

        def _process_images(self, images: Any, **arguments: Any) -> Any:
            return super()._process_images(images, **arguments | {"patch_size": self.side})

        def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
            rows, columns = (int(each) // self.side for each in image_inputs["image_sizes"][image_idx])
            return "[IMG_BREAK]".join([self.image_token * columns] * rows) + "[IMG_END]"

    return PixtralProcessor
