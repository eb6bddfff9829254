"""Processors of images as checkpoints of several families have them, with a small tokenizer, for tiny images."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from tests.checkpoints import write_tokenizer


class ProcessorFiles(NamedTuple):
    """What the files of a checkpoint say about its processor."""

    model_type: str
    name: str
    image_processor: dict[str, Any]
    settings: dict[str, Any] = {}
    tokens: dict[str, str] = {}
    """Tokens that the tokenizer knows by name."""
    others: tuple[str, ...] = ()
    """Further special tokens."""


_QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
_QWEN_SIZE = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}}
_CLIP = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28}}
_CROPPED = {"crop_size": {"height": 28, "width": 28}}
_TILES = {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "min_patches": 1, "max_patches": 4}
_INTERN_TOKENS = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
_GEMMA_TOKENS = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}

PROCESSORS = {
    "qwen2-vl": ProcessorFiles("qwen2_vl", "Qwen2VLProcessor", _QWEN | _QWEN_SIZE, others=_QWEN_TOKENS),
    "qwen2.5-vl": ProcessorFiles("qwen2_5_vl", "Qwen2_5_VLProcessor", _QWEN | _QWEN_SIZE, others=_QWEN_TOKENS),
    "qwen3-vl": ProcessorFiles(
        "qwen3_vl", "Qwen3VLProcessor", _QWEN | _QWEN_SIZE | {"patch_size": 16}, others=_QWEN_TOKENS
    ),
    "gemma3": ProcessorFiles(
        "gemma3",
        "Gemma3Processor",
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}},
        {"image_seq_length": 4},
        _GEMMA_TOKENS,
    ),
    "gemma4": ProcessorFiles(
        "gemma4",
        "Gemma4Processor",
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 14, "max_soft_tokens": 70},
        {},
        {
            "boi_token": "<|image>",
            "image_token": "<|image|>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
    ),
    "glm4v": ProcessorFiles(
        "glm4v",
        "Glm4vProcessor",
        _QWEN | {"image_processor_type": "Glm4vImageProcessor"}
        # Of two frames, as which an image counts here.
        | {"size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 28 * 28 * 16}},
        others=("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
                "<|end_of_video|>"),
    ),
    "pixtral": ProcessorFiles(
        "mistral3",
        "PixtralProcessor",
        {"image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 14, "width": 14},
         "size": {"longest_edge": 84}},
        {"patch_size": 14, "spatial_merge_size": 2},
        others=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ),
    "llava": ProcessorFiles(
        "llava",
        "LlavaProcessor",
        _CLIP | _CROPPED,
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        others=("<image>",),
    ),
    "llava-next": ProcessorFiles(
        "llava_next",
        "LlavaNextProcessor",
        {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 28},
         "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]} | _CROPPED,
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        others=("<image>",),
    ),
    "idefics3": ProcessorFiles(
        "idefics3",
        "Idefics3Processor",
        {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 112},
         "max_image_size": {"longest_edge": 56}},
        {"image_seq_len": 4},
        others=("<fake_token_around_image>", "<image>", "<end_of_utterance>"),
    ),
    "smolvlm": ProcessorFiles(
        "smolvlm",
        "SmolVLMProcessor",
        {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 112},
         "max_image_size": {"longest_edge": 56}},
        {"image_seq_len": 4},
        {"fake_image_token": "<fake_token_around_image>", "image_token": "<image>",
         "global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"},
    ),
    "lfm2-vl": ProcessorFiles(
        "lfm2_vl",
        "Lfm2VlProcessor",
        {"image_processor_type": "Lfm2VlImageProcessorFast", "encoder_patch_size": 14, "tile_size": 56,
         "min_image_tokens": 4, "max_image_tokens": 6, "max_tiles": 4, "max_pixels_tolerance": 0.9},
        {},
        {"image_token": "<image>", "image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
         "image_thumbnail_token": "<|img_thumbnail|>"},
    ),
    "llava-onevision": ProcessorFiles(
        "llava_onevision",
        "LlavaOnevisionProcessor",
        {"image_processor_type": "LlavaOnevisionImageProcessor", "size": {"height": 28, "width": 28},
         "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56]]},
        {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
        others=("<image>", "<video>"),
    ),
    "lighton-ocr": ProcessorFiles(
        "lighton_ocr",
        "LightOnOcrProcessor",
        {"image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 14, "width": 14},
         "size": {"longest_edge": 84}},
        {"patch_size": 14, "spatial_merge_size": 2},
        {"image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>"},
    ),
    "idefics2": ProcessorFiles(
        "idefics2",
        "Idefics2Processor",
        {"image_processor_type": "Idefics2ImageProcessor", "size": {"longest_edge": 56, "shortest_edge": 28}},
        {"image_seq_len": 4},
        others=("<fake_token_around_image>", "<image>", "<end_of_utterance>"),
    ),
    "video-llama-3": ProcessorFiles(
        "video_llama_3",
        "VideoLlama3Processor",
        {"image_processor_type": "VideoLlama3ImageProcessor", "patch_size": 14, "merge_size": 2,
         "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 16},
        others=_QWEN_TOKENS,
    ),
    "deepseek-vl": ProcessorFiles(
        "deepseek_vl",
        "DeepseekVLProcessor",
        {"image_processor_type": "DeepseekVLImageProcessor", "size": {"height": 28, "width": 28}, "min_size": 14},
        {"num_image_tokens": 4},
        {"image_token": "<image_placeholder>"},
    ),
    "aria": ProcessorFiles(
        "aria",
        "AriaProcessor",
        {"image_processor_type": "AriaImageProcessor", "max_image_size": 980, "min_image_size": 336},
        {"size_conversion": {"980": 4}},
        {"image_token": "<image>"},
    ),
    "aya-vision": ProcessorFiles(
        "aya_vision",
        "AyaVisionProcessor",
        {"image_processor_type": "GotOcr2ImageProcessor"} | _TILES,
        {"patch_size": 14, "img_size": 56, "downsample_factor": 2},
        others=("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "TILE", "TILE_GLOBAL"),
    ),
    "cohere2-vision": ProcessorFiles(
        "cohere2_vision",
        "Cohere2VisionProcessor",
        {"image_processor_type": "Cohere2VisionImageProcessor", "size": {"height": 56, "width": 56}, "patch_size": 2,
         "max_patches": 4},
        {},
        {"boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>", "image_token": "<|IMG_PATCH|>",
         "img_line_break_token": "<|IMG_LINE_BREAK|>"},
    ),
    "deepseek-ocr2": ProcessorFiles(
        "deepseek_ocr2",
        "DeepseekOcr2Processor",
        {"image_processor_type": "DeepseekOcr2ImageProcessor"},
        {"patch_size": 16, "downsample_ratio": 4},
        {"image_token": "<image>"},
    ),
    "hyperclovax-vision": ProcessorFiles(
        "hyperclovax_vision_v2", "HyperCLOVAXVisionV2Processor", _QWEN | _QWEN_SIZE, others=_QWEN_TOKENS
    ),
    "lfm3-vl": ProcessorFiles("lfm3_vl", "Lfm3VlProcessor", _QWEN | _QWEN_SIZE, others=_QWEN_TOKENS),
    "mistral-large4": ProcessorFiles(
        "mistral_large4",
        "PixtralProcessor",
        {"image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 14, "width": 14},
         "size": {"longest_edge": 84}},
        {"patch_size": 14, "spatial_merge_size": 2},
        others=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ),
    "got-ocr2": ProcessorFiles(
        "got_ocr2",
        "GotOcr2Processor",
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 256, "width": 256}},
        others=("<img>", "</img>", "<imgpad>"),
    ),
    "qianfan-ocr": ProcessorFiles(
        "qianfan_ocr",
        "QianfanOCRProcessor",
        {"image_processor_type": "GotOcr2ImageProcessor"} | _TILES,
        {"image_seq_length": 4},
        _INTERN_TOKENS,
    ),
    "janus": ProcessorFiles(
        "janus",
        "JanusProcessor",
        {"image_processor_type": "JanusImageProcessor", "size": {"height": 28, "width": 28}, "min_size": 14},
        {"num_image_tokens": 4},
        {"image_token": "<image_placeholder>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "exaone4.5": ProcessorFiles("exaone4_5", "Exaone4_5_Processor", _QWEN | _QWEN_SIZE, others=_QWEN_TOKENS),
    "dots3-note": ProcessorFiles(
        "dots3_note",
        "Dots3NoteProcessor",
        _QWEN | _QWEN_SIZE | {"temporal_patch_size": 1},
        others=("<|imgpad|>", "<|video_pad|>", "<|audio_comp_pad|>"),
    ),
    "llava-next-video": ProcessorFiles(
        "llava_next_video",
        "LlavaNextVideoProcessor",
        {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 28},
         "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]} | _CROPPED,
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        others=("<image>", "<video>"),
    ),
    "internvl": ProcessorFiles(
        "internvl",
        "InternVLProcessor",
        {"image_processor_type": "GotOcr2ImageProcessor"} | _TILES,
        {"image_seq_length": 4},
        _INTERN_TOKENS | {"video_token": "<video>"},
    ),
}  # fmt: skip
"""By family."""


def write_processor(directory: Path, family: str, tokenizer: bool = True) -> Path:
    """Write the processor of a family beside a tokenizer, which becomes one of the family's special tokens too; a
    config.json that is there stays."""
    files = PROCESSORS[family]
    directory.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        write_tokenizer(directory)
    path = directory / "tokenizer.json"
    words = Tokenizer.from_file(str(path))
    words.add_special_tokens([AddedToken(text, special=True) for text in (*files.tokens.values(), *files.others)])
    words.save(str(path))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "extra_special_tokens": files.tokens}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if not (directory / "config.json").exists():
        (directory / "config.json").write_text(json.dumps({"model_type": files.model_type}))
    (directory / "preprocessor_config.json").write_text(json.dumps(files.image_processor))
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": files.name} | files.settings))
    return directory
