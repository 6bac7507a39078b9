"""Program text to each rank's ops."""
