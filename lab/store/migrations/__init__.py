"""The schema's history, run by lab.store.engine when a store is opened."""
