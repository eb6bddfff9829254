"""Repositories of a few files, as the tests of the repository have them."""

from ...repository.conftest import toys as toys
from ...repository.conftest import world as world
