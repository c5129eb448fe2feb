"""The one exception that reaches a user as a sentence instead of a traceback."""


class UserError(Exception):
    """Something the user can put right; its text is one clear sentence."""
