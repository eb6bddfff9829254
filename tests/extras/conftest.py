"""The endpoints' gateway that needs no model."""

from ..api.conftest import gateway as gateway
