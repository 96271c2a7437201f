"""Limits on what is read from files and servers. Every reader of foreign data checks them before it allocates memory.

They are chosen so that no reader needs more than 512 MB beside the data that it returns. Does not import torch.
"""

MOST_PICTURE_BYTES = 10_000_000
"""bytes of an image file"""
MOST_PICTURE_PIXELS = 25_000_000
"""pixels of an image, by the size that its header declares. Decoding takes up to 16 bytes per pixel (WebP)"""
MOST_PICTURE_SIDE = 32_768
"""width and height of an image: resizing an image of 1 x 25,000,000 pixels would first make it wider"""
PIXELS_AT_ONCE = MOST_PICTURE_PIXELS
"""pixels that are being decoded at the same time, over all threads"""
MOST_JPEG_SCANS = 100
"""scans of a progressive JPEG file; encoders write about 10. Each one is a pass over all pixels"""

MOST_FOLDER_ENTRIES = 300_000
"""files and folders in a folder of images, and in a folder that is searched for a data set"""
MOST_FOLDER_DEPTH = 32
"""folders inside folders; symbolic links to folders are not followed below a class"""

MOST_TEXT_BYTES = 100_000_000
"""bytes of a text to learn: as many as enwik8 has"""
MOST_SYMBOLS = 65_536
"""different characters of a text"""
MOST_LIST_BYTES = 10_000_000
"""bytes of a dictionary or a list of words: about three times the CMU dictionary"""
MOST_LIST_LINES = 500_000
"""lines of a dictionary or a list of words"""

MOST_UNPACKED = 512_000_000
"""bytes that an archive unpacks to, the members that are skipped included"""
MOST_RATIO = 100
"""unpacked bytes per packed byte, of an archive or a gzip file, once it unpacks to more than UNPACKED_FLOOR"""
UNPACKED_FLOOR = 10_000_000
"""bytes that any archive may unpack to: small files of zeros compress by more than MOST_RATIO"""
MOST_MEMBERS = 10_000
"""files and folders in an archive"""
MOST_MEMBER_BYTES = 64_000_000
"""bytes of one file of a data set, unpacked"""
MOST_DATASET_BYTES = 256_000_000
"""bytes of all files of a data set, unpacked: CIFAR-10 has 184 million"""
MOST_HEADER_BYTES = 1_000_000
"""bytes of one extended header of a tar archive, and of the directory of a zip archive"""

MOST_DOWNLOAD_BYTES = 512_000_000
"""bytes of a download"""
DOWNLOAD_WAITS = (1, 2, 4, 8, 16)
"""seconds before each further request for a download that broke off; after the last one it fails"""
LEAST_SPEED = 1_000
"""bytes per second of a download, on average once it takes longer than a minute"""

MOST_MATRIX_BYTES = 10_000_000
"""bytes of a file of matrices or of a mask"""
MOST_MATRIX_VALUES = 2**22
"""values of all arrays in a file, read from the headers of the arrays before the arrays are read"""

MOST_IMAGE_SIZE = 2_048
"""image_size in a config"""
MOST_LENGTH = 65_536
"""length and set_size in a config"""
MOST_EXAMPLES = 10_000_000
"""limit, validation and window in a config; to shuffle so many takes about 400 MB"""


def most_unpacked(packed: int, most: int = MOST_UNPACKED) -> int:
    """Bytes that `packed` bytes may unpack to: at most `most`, and at most MOST_RATIO as many beyond the floor."""
    return min(most, max(UNPACKED_FLOOR, MOST_RATIO * packed))
