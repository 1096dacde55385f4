"""Adapters and a frozen base: ``targets`` says what can have one, ``frozen`` keeps the rest so."""
