"""Drawing that knows no probe."""
