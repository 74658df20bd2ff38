"""Telling others of events: registrations, and the relay of the outbox."""
