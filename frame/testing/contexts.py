"""Contexts to construct plugins with in tests: those of the kinds that need no device.

Used by the conformance suites, the tests and plugin authors' tests. Must import no torch.
"""

from __future__ import annotations

from frame.core.interfaces.cache import EvictionContext
from frame.core.interfaces.scheduling import SchedulingContext
from frame.interfaces.parsing import ParserContext
from frame.interfaces.routing import RoutingContext

SCHEDULING = SchedulingContext(max_running_requests=16, token_budget=256, max_context=1024, page_size=4, num_pages=1024)
EVICTION = EvictionContext(page_size=4, num_pages=1024)
ROUTING = RoutingContext(seed=5)
PARSER = ParserContext()
