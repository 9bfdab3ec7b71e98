//! A decoder for the most common kind of JPEG file: sequential, 8 bits, one scan, grey or YCbCr, colours
//! at whole or half size. What it decodes is bit for bit what libjpeg, and so PIL, decodes.
//!
//! It is strict: what is not of that kind, or not complete to the last bit, it leaves to the slower decoder in `decode`, which
//! also reports all errors. Only the requested part of an image is computed; all of it is read, because the position
//! of a coefficient is known only when all before it are.

mod header;
mod huffman;
mod rows;

use std::array;
use std::ops::Range;

use polyreme_kernels::Isa;
use polyreme_kernels::jpeg::{PLACES, flat, idct};

use super::resize::{ImageSize, ResizePart};
use header::Header;
use huffman::{BLOCK, Bits, HuffmanTable, clean};
pub(super) use rows::Rows;

/// The restart marker, less its number, and the marker that ends the file.
const RESTART: u8 = 0xd0;
const END: u8 = 0xd9;

/// Decodes one file after another, reusing its memory.
#[derive(Debug)]
pub(super) struct Decoder {
    /// The CPU features that it uses; the pixels are the same with any.
    pub(super) isa: Isa,
    dc: [HuffmanTable; 4],
    ac: [HuffmanTable; 4],
    /// A cleaned segment of the stream.
    stream: Vec<u8>,
    planes: [Plane; 3],
    /// The chroma of one row at full size.
    colours: [Vec<u8>; 2],
    /// The rows of pixels that are kept.
    kept: Vec<u8>,
}

/// The samples of a component: those blocks that the part needs.
#[derive(Default, Debug)]
struct Plane {
    samples: Vec<u8>,
    /// The blocks of the image that it holds.
    down: Range<usize>,
    across: Range<usize>,
}

impl Default for Decoder {
    fn default() -> Decoder {
        Decoder {
            isa: Isa::detect(),
            dc: array::from_fn(|_| HuffmanTable::default()),
            ac: array::from_fn(|_| HuffmanTable::default()),
            stream: Vec::new(),
            planes: array::from_fn(|_| Plane::default()),
            colours: [Vec::new(), Vec::new()],
            kept: Vec::new(),
        }
    }
}

impl Decoder {
    /// Decodes the part that `part` names once the size is known; the result yields its rows, as one channel where `grey`,
    /// else as three. `None`: the file is not of the common kind, or broken.
    pub(super) fn decode(
        &mut self,
        file: &[u8],
        grey: bool,
        part: impl FnOnce(ImageSize) -> ResizePart,
    ) -> Option<Rows<'_>> {
        let header = header::read(file)?;
        let part = part(header.size);
        let n_planes = if grey { 1 } else { header.components.len() };
        let frame = Frame::new(&header);
        for (component, plane) in frame.components.iter().zip(&mut self.planes) {
            plane.reserve(component, &part);
        }
        for plane in &mut self.planes[n_planes..] {
            (plane.down, plane.across) = (0..0, 0..0);
        }
        self.fill(&header, &frame)?;
        Some(Rows::new(self, header.size, part, grey, &frame.components[..n_planes]))
    }

    /// Reads the scan into the planes.
    fn fill(&mut self, header: &Header<'_>, frame: &Frame) -> Option<()> {
        for component in &header.components {
            self.dc[component.dc.number].set(component.dc, true)?;
            self.ac[component.ac.number].set(component.ac, false)?;
        }
        let (mut block, mut ignored) = ([0; BLOCK], [0; BLOCK]);
        let mut scan = header.scan;
        let n_units = frame.down * frame.across;
        let mut unit = 0;
        // Restart markers are numbered from 0 to 7, over and over.
        for restart in (0..8).cycle() {
            let (len, marker, behind) = clean(scan, &mut self.stream)?;
            scan = behind;
            let mut bits = Bits::new(&self.stream, len);
            let mut last = [0; 3];
            let end = if header.restart == 0 { n_units } else { n_units.min(unit + header.restart) };
            while unit < end {
                let (y, x) = (unit / frame.across, unit % frame.across);
                let x_end = frame.across.min(x + end - unit);
                unit += x_end - x;
                for x in x..x_end {
                    for (i, component) in frame.components.iter().enumerate() {
                        let Codes { dc, ac } = component.codes;
                        let (dc, ac) = (&self.dc[dc], &self.ac[ac]);
                        let plane = &mut self.planes[i];
                        for at_y in y * component.down..(y + 1) * component.down {
                            for at_x in x * component.across..(x + 1) * component.across {
                                let Some((out, stride)) = plane.block(at_y, at_x) else {
                                    bits.block(dc, ac, &mut ignored, &mut last[i])?;
                                    continue;
                                };
                                let n = bits.block(dc, ac, &mut block, &mut last[i])?;
                                let block = block.first_chunk_mut().expect("a block is longer than 64");
                                if n == 1 {
                                    flat(block[0].wrapping_mul(component.quants[0]), out, stride);
                                    block[0] = 0;
                                } else {
                                    idct(self.isa, block, &component.quants, out, stride);
                                }
                            }
                        }
                    }
                }
                // This also stops at a stream that has ended too early.
                bits.at_end()?;
            }
            if !bits.at_end()? {
                return None;
            }
            let expected = if unit == n_units { END } else { RESTART + restart };
            if marker != expected {
                return None;
            }
            if unit == n_units {
                return Some(());
            }
        }
        None
    }
}

/// The units of a scan, and the components of each.
struct Frame {
    down: usize,
    across: usize,
    components: Vec<Component>,
}

struct Component {
    /// How many blocks a unit has.
    down: usize,
    across: usize,
    /// Pixels of the image per sample.
    scale: (usize, usize),
    /// The size in samples.
    size: ImageSize,
    /// The quantisation table, in the order of coefficients.
    quants: [i16; 64],
    codes: Codes,
}

#[derive(Clone, Copy)]
struct Codes {
    dc: usize,
    ac: usize,
}

impl Frame {
    fn new(header: &Header<'_>) -> Frame {
        // The first component is the largest.
        let (down, across) = (header.components[0].down, header.components[0].across);
        let component = |c: &header::Component<'_>| {
            let scale = (down / c.down, across / c.across);
            let mut quants = [0; 64];
            for (k, &quant) in c.quants.iter().enumerate() {
                quants[usize::from(huffman::ZIGZAG[k])] = i16::from(quant);
            }
            Component {
                down: c.down,
                across: c.across,
                scale,
                size: ImageSize {
                    height: header.size.height.div_ceil(scale.0),
                    width: header.size.width.div_ceil(scale.1),
                },
                quants,
                codes: Codes { dc: c.dc.number, ac: c.ac.number },
            }
        };
        Frame {
            down: header.size.height.div_ceil(8 * down),
            across: header.size.width.div_ceil(8 * across),
            components: header.components.iter().map(component).collect(),
        }
    }
}

impl Plane {
    /// Makes room for the blocks that `part` needs.
    fn reserve(&mut self, component: &Component, part: &ResizePart) {
        let blocks = |pixels: &Range<usize>, scale: usize, n: usize| {
            let samples = samples(pixels, scale, n);
            samples.start / 8..samples.end.div_ceil(8)
        };
        self.down = blocks(&part.rows, component.scale.0, component.size.height);
        self.across = blocks(&part.columns, component.scale.1, component.size.width);
        let len = self.down.len() * self.across.len() * 64;
        if self.samples.len() < len {
            self.samples.resize(len, 0);
        }
    }

    /// Where the samples of a block go, and the stride of its rows.
    fn block(&mut self, y: usize, x: usize) -> Option<(&mut [u8], usize)> {
        if !self.down.contains(&y) || !self.across.contains(&x) {
            return None;
        }
        let stride = self.stride();
        let at = (y - self.down.start) * 8 * stride + (x - self.across.start) * 8;
        Some((&mut self.samples[at..], stride))
    }

    fn stride(&self) -> usize {
        8 * self.across.len()
    }

    /// The samples from row `y` and column `x` on, counted in the image.
    fn from(&self, y: usize, x: usize) -> &[u8] {
        &self.samples[(y - 8 * self.down.start) * self.stride() + x - 8 * self.across.start..]
    }

    /// The samples `columns` of row `y`.
    fn row(&self, y: usize, columns: &Range<usize>) -> &[u8] {
        &self.from(y, columns.start)[..columns.len()]
    }
}

/// The samples of a component that `pixels` need: of subsampled ones, also the neighbours.
fn samples(pixels: &Range<usize>, scale: usize, n: usize) -> Range<usize> {
    if scale == 1 {
        return pixels.clone();
    }
    (pixels.start / scale).saturating_sub(1)..(pixels.end.div_ceil(scale) + 1).min(n)
}

const _: () = assert!(PLACES[0] == 0, "the first coefficient is first");

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
