"""HTML: one self-contained page that shows a log, or two over each other. It asks no network.

    pools, requests, transfers, GPU blocks, host pages     lanes of state over seq or step
    a cursor that shows the state, a search by id, the causal chain of every change

Owns      the page: `page.html`, `page.css` and the scripts beside this module, inlined, and the
          payload of each log (`payload`), which `lanes` makes in one pass over it.
Edges     what a log says goes in compressed and as base64 only, and the page shows it as text: no
          byte of a log can become markup. A content security policy names the script by its hash.
          Where events are missing or cannot be folded the page is hatched, and says why.
"""

from __future__ import annotations

from hisparse.export.html.lanes import Record, Source
from hisparse.export.html.page import Report, write

__all__ = ["Record", "Report", "Source", "write"]
