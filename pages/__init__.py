"""The pages of the app, thin: a form, a run, figures, exports."""
