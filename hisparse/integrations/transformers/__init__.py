"""Hugging Face transformers over the tiers: `model.generate()` of models with a sparse indexer.

Importing this package needs the extra ``hisparse[transformers]``. What is supported, what is
refused and why: docs/transformers.md.
"""

from hisparse.integrations.transformers.versions import require

require()
