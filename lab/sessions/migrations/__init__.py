"""The schema's history, run by lab.sessions.database when a store is opened."""
