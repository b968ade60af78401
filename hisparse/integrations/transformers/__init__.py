"""Hugging Face transformers over the tiers: `model.generate()` of models with a sparse indexer.

    backend = HiSparseBackend(config_of(model, pools=..., schedule=...), log="runs/chat")
    with HiSparseCache(model, backend) as cache:
        model.generate(**inputs, past_key_values=cache)

Importing this package needs the extra ``hisparse[transformers]``. What is supported, what is
refused and why: docs/transformers.md.
"""

from hisparse.integrations.transformers.versions import require

require()

from hisparse.integrations.transformers.attention import attach, detach  # noqa: E402
from hisparse.integrations.transformers.cache import HiSparseCache  # noqa: E402
from hisparse.integrations.transformers.layout import config_of, layout_of  # noqa: E402
from hisparse.integrations.transformers.tiny import tiny_model  # noqa: E402

__all__ = ["HiSparseCache", "attach", "config_of", "detach", "layout_of", "tiny_model"]
