"""What HTTP alone may be told, under tritonserver's and vLLM's names. Free of any server: the command line reads it."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from ..api.size_limits import BODY_TIMEOUT


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Settings of HTTP."""

    http_restricted_api: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Parts of the API that only those may use whose request has this header, as `<api>[,<api>]:<key>=<value>`; may
    be given several times."""
    http_body_timeout_secs: Annotated[float, Parameter(validator=Number(gt=0))] = BODY_TIMEOUT
    """Silence within a request's body after which it is given up, with 408."""
    http_header_forward_pattern: str = ""
    """Regular expression; headers whose name has a part that matches become parameters of `infer`."""
    allowed_origins: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Origin of web pages that may ask, or * for all; may be given several times, or as a JSON list."""
