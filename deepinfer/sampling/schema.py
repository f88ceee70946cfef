"""Which JSON schemas can be enforced.

Knows keywords; must not know tokens or the library that enforces them.
"""

from deepinfer.errors import RequestError


def check_schema(schema: object) -> None:
    """Refuse a schema with a keyword that would not be enforced.

    Args:
        schema: what json.loads gives.

    Raises:
        RequestError: as said; the message has the keyword's place.
    """
    if schema is not True and not isinstance(schema, dict):
        raise RequestError(f"structured.json_schema = {schema!r:.200}: expected an object")
