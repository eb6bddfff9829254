"""The load header of Open Request Cost Aggregation: how full a model's cache is, told with its answers.

Knows v2-protocol section 8.5 and nothing of engines.
"""

import orjson

from ...core.model import ModelStats

FORMAT_HEADER = "endpoint-load-metrics-format"
_TOLD = "endpoint-load-metrics"


def load_header(form: str, stats: ModelStats) -> dict[str, str]:
    """The header in the format that the client asked for; none for another format, or for a model without a cache."""
    capacity = stats.kv_token_capacity
    if not capacity:
        return {}
    utilization = stats.kv_tokens / capacity
    if form == "text":
        usage = f"named_metrics.kv_cache_utilization={utilization:f}, named_metrics.max_token_capacity={capacity}"
        return {_TOLD: f"TEXT {usage}"}
    if form == "json":
        named = {"kv_cache_utilization": utilization, "max_token_capacity": capacity}
        return {_TOLD: f"JSON {orjson.dumps({'named_metrics': named}).decode()}"}
    return {}
