"""What the app needs from Streamlit and is no page."""
