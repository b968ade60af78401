"""Models of the main job by name: the built-in one, and those of transformers."""

from __future__ import annotations

from hisparse.engine.options import RunConfig
from hisparse.engine.reference import Model
from hisparse.engine.run import build_builtin


def build_model(config: RunConfig, max_model_len: int) -> Model:
    """The model that `config.model` names. Raises UsageError, with the extra to install, where it
    needs transformers and there is none."""
    if config.model == "builtin":
        return build_builtin(config, max_model_len)
    import torch

    from hisparse.integrations.transformers.serving import ServedModel
    from hisparse.integrations.transformers.tiny import tiny_model

    torch.set_num_threads(1)  # more of them are not batch-invariant, whatever OMP_NUM_THREADS says
    model = tiny_model(
        config.model, seed=config.seed, top_k=config.top_k, max_model_len=max_model_len
    )
    return ServedModel(model, max_model_len=max_model_len)
