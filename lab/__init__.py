"""What a front end needs: the command line, the app, figures, labels, export."""
