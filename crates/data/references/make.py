"""Makes the image files and what PIL and torchvision make of them. Run: python make.py (Pillow, torchvision, numpy)."""
import os
import shutil
import subprocess

import numpy as np
from PIL import Image
from torchvision import transforms

HERE = os.path.dirname(os.path.abspath(__file__))


def picture(height, width):
    """Smooth colours, an edge and a little noise."""
    y, x = np.mgrid[0:height, 0:width]
    r = 127 + 120 * np.sin(x / 5.0) * np.cos(y / 7.0)
    g = 255.0 * x / max(1, width - 1)
    b = np.where(x + y > (height + width) / 2, 220, 30) + np.random.default_rng(1).integers(0, 20, (height, width))
    return Image.fromarray(np.stack([r, g, b], 2).clip(0, 255).astype(np.uint8), "RGB")


def write(name, image):
    """The pixels: height and width as two little-endian u32, then [height, width, channels]."""
    pixels = np.asarray(image)
    with open(os.path.join(HERE, name), "wb") as f:
        f.write(np.array(pixels.shape[:2], "<u4").tobytes() + pixels.tobytes())


def file(name, image, **how):
    path = os.path.join(HERE, name)
    image.save(path, **how)
    with Image.open(path) as again:
        write(name + ".rgb", again.convert("RGB"))
        write(name + ".grey", again.convert("L"))


colours = picture(23, 37)
file("baseline.jpg", colours, quality=90)
file("whole.jpg", colours, quality=95, subsampling=0)
file("progressive.jpg", colours, quality=85, progressive=True)
file("restarts.jpg", colours, quality=85, restart_marker_blocks=2)
file("half.jpg", colours, quality=80, subsampling=1, restart_marker_rows=1)
file("narrow.jpg", colours.crop((0, 0, 4, 9)), quality=90)
file("coarse.jpg", picture(30, 50), quality=5, optimize=True)
if shutil.which("jpegtran"):
    path = os.path.join(HERE, "upright.jpg")
    subprocess.run(["jpegtran", "-transpose", "-outfile", path, os.path.join(HERE, "half.jpg")], check=True)
    with Image.open(path) as again:
        write("upright.jpg.rgb", again.convert("RGB"))
file("grey.jpg", colours.convert("L"), quality=90)
file("cmyk.jpg", colours.convert("CMYK"), quality=95)
file("palette.png", colours.quantize(17))
file("bits.png", colours.convert("1"))
alpha = colours.copy()
alpha.putalpha(Image.fromarray(np.arange(23 * 37, dtype=np.uint64).reshape(23, 37).astype(np.uint8)))
file("alpha.png", alpha)

for name, (height, width), size in [
    ("shrunk", (43, 61), 20), ("tall", (61, 43), 32), ("grown", (9, 13), 16), ("odd", (31, 40), 15), ("same", (12, 12), 12),
]:
    image = picture(height, width)
    image.save(os.path.join(HERE, name + ".png"))
    how = transforms.Compose([transforms.Resize(size), transforms.CenterCrop(size)])
    write(f"{name}.png.{size}", how(image))
