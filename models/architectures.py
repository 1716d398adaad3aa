"""What a configuration says of a model before a weight is read: its class, its quantisation, what stays in float32."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
)
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from engram_lab.models import weightfiles
from engram_lab.models.errors import CheckpointError, first_line


def build_config(folder: Path, raw: dict[str, Any], trust_remote_code: bool) -> Any:
    kind = str(raw.get("model_type"))
    if "transformers_weights" in raw:
        raise CheckpointError(
            f"{folder}/config.json names weights of its own (transformers_weights), which this lab would not take: "
            "save the model with its weights in model.safetensors."
        )
    if kind not in CONFIG_MAPPING and not trust_remote_code:
        if "auto_map" in raw:
            raise CheckpointError(
                f'{folder} is of the type "{kind}" and brings its own code, which runs only if asked for: '
                "trust_remote_code=True."
            )
        raise CheckpointError(f'{folder} is of the type "{kind}", an architecture that this lab does not know.')
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # a bad value anywhere in the configuration
        raise CheckpointError(f"{folder}/config.json cannot be used: {first_line(error)}") from error
    what = "not a causal language model"
    if known := class_of(config):
        what = ""
        if getattr(config, "is_encoder_decoder", False):
            what = "an encoder with a decoder, which turns one text into another"
        elif type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", None) is False:
            what = "an encoder, which reads a text in both directions"
    if what and (known or "AutoModelForCausalLM" not in raw.get("auto_map", {})):
        raise CheckpointError(f'{folder} is of the type "{kind}", which is {what}: choose one that continues text.')
    return config


def class_of(config: Any) -> Any:
    """transformers' class of a causal LM, or of one that takes images too and runs on text alone; None for neither."""
    for known in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING):
        if type(config) in known:
            found = known[type(config)]
            return found[0] if isinstance(found, tuple) else found
    return None


def quantisation(folder: Path, raw: dict[str, Any]) -> str | None:
    """How the weights are quantised, None if they are not; CheckpointError for what transformers does not know."""
    settings = raw.get("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method is None and isinstance(settings, dict) and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"  # which left its name out at first
    if not isinstance(method, str):
        raise CheckpointError(
            f"{folder}/config.json has a quantization_config that does not say how (quant_method): if the weights are "
            "not quantised, take it out."
        )
    if method != "bitsandbytes" and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:  # there it has two names
        raise CheckpointError(
            f"{folder} is quantised with {method}, which transformers does not know: use the unquantised checkpoint."
        )
    return method


def kept_in_float32(model_class: Any, config: Any, entries: Mapping[str, weightfiles.Entry]) -> Callable[[str], object]:
    """Whether a tensor is one that transformers may keep in float32 whatever the model runs in.

    That is each one stored in float32 among others of 16 bits. Where all are in float32 the model has to be asked, and
    not its class alone: it takes over what its parts say.
    """
    if weightfiles.stored_dtype(entries) != torch.float32:
        return lambda name: entries[name].dtype == "F32"
    with torch.device("meta"):
        model = model_class(config)
    names = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    return re.compile("|".join(rf"(^|\.){name}($|\.)" for name in names) or "(?!)").search
