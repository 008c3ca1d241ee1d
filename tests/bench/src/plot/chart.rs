//! Bars and lines as SVG.

use anyhow::anyhow;
use plotters::{
    chart::{ChartBuilder, LabelAreaPosition, SeriesLabelPosition},
    drawing::IntoDrawingArea as _,
    element::{Circle, Rectangle},
    series::LineSeries,
    style::{Color as _, IntoFont as _, RGBColor, TRANSPARENT, TextStyle},
};
use plotters_svg::SVGBackend;

const WIDTH: u32 = 900;
const HEIGHT: u32 = 360;
/// Text and axes: as far from white as from black.
const NEUTRAL: RGBColor = RGBColor(125, 133, 144);
/// Colours of series, told apart by those who do not see red or green, too (Okabe and Ito).
const COLOURS: [RGBColor; 4] =
    [RGBColor(0, 114, 178), RGBColor(230, 159, 0), RGBColor(0, 158, 115), RGBColor(204, 121, 167)];
/// Part of a group's width that its bars take.
const FILL: f64 = 0.8;
/// Room above the highest value.
const HEADROOM: f64 = 1.15;

/// Groups of bars side by side. Series without any value are left out.
pub(super) struct Bars {
    pub(super) title: String,
    pub(super) series: Vec<String>,
    /// Name of the group, and the value of each series.
    pub(super) groups: Vec<(String, Vec<Option<f64>>)>,
}

/// Lines over numbers.
pub(super) struct Lines {
    pub(super) title: String,
    /// What is counted from left to right.
    pub(super) across: String,
    pub(super) lines: Vec<(String, Vec<(f64, f64)>)>,
}

impl Bars {
    pub(super) fn draw(&self) -> anyhow::Result<String> {
        let has = |index: &usize| self.groups.iter().any(|(_, values)| values.get(*index).copied().flatten().is_some());
        let series: Vec<usize> = (0..self.series.len()).filter(has).collect();
        let values = self.groups.iter().flat_map(|(_, values)| values.iter().flatten().copied());
        let highest = values.fold(0.0, f64::max).max(f64::MIN_POSITIVE) * HEADROOM;
        let mut svg = String::new();
        {
            let area = SVGBackend::with_string(&mut svg, (WIDTH, HEIGHT)).into_drawing_area();
            let mut builder = ChartBuilder::on(&area);
            builder
                .caption(&self.title, text(18))
                .margin(8)
                .set_label_area_size(LabelAreaPosition::Left, 48)
                .set_label_area_size(LabelAreaPosition::Bottom, 28);
            let across = 0.0..self.groups.len() as f64;
            let mut chart = builder.build_cartesian_2d(across, 0.0..highest).map_err(failed)?;
            // The names of the groups are drawn below, in the middle of each.
            chart
                .configure_mesh()
                .disable_x_mesh()
                .x_labels(0)
                .axis_style(NEUTRAL)
                .bold_line_style(NEUTRAL.mix(0.3))
                .light_line_style(TRANSPARENT)
                .label_style(text(12))
                .draw()
                .map_err(failed)?;
            let width = FILL / series.len().max(1) as f64;
            for (place, index) in series.iter().enumerate() {
                let colour = COLOURS[index % COLOURS.len()];
                let bars = self.groups.iter().enumerate().filter_map(|(group, (_, values))| {
                    let value = values.get(*index).copied().flatten()?;
                    let left = group as f64 + (1.0 - FILL) / 2.0 + place as f64 * width;
                    Some(Rectangle::new([(left, 0.0), (left + width * 0.92, value)], colour.filled()))
                });
                let drawn = chart.draw_series(bars).map_err(failed)?;
                drawn
                    .label(&self.series[*index])
                    .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 10, y + 5)], colour.filled()));
            }
            let plotting = chart.plotting_area();
            for (group, (name, _)) in self.groups.iter().enumerate() {
                let (x, y) = plotting.map_coordinate(&(group as f64 + 0.5, 0.0));
                let size = i32::try_from(name.len()).unwrap_or(0) * 3;
                area.draw_text(name, &text(12), (x - size, y + 8)).map_err(failed)?;
            }
            chart
                .configure_series_labels()
                .position(SeriesLabelPosition::UpperRight)
                .label_font(text(13))
                .draw()
                .map_err(failed)?;
            area.present().map_err(failed)?;
        }
        Ok(svg)
    }
}

impl Lines {
    pub(super) fn draw(&self) -> anyhow::Result<String> {
        let points = || self.lines.iter().flat_map(|(_, points)| points.iter().copied());
        let right = points().map(|(x, _)| x).fold(1.0, f64::max);
        let highest = points().map(|(_, y)| y).fold(1.0, f64::max) * HEADROOM;
        let mut svg = String::new();
        {
            let area = SVGBackend::with_string(&mut svg, (WIDTH, HEIGHT)).into_drawing_area();
            let mut builder = ChartBuilder::on(&area);
            builder
                .caption(&self.title, text(18))
                .margin(8)
                .margin_right(30)
                .set_label_area_size(LabelAreaPosition::Left, 60)
                .set_label_area_size(LabelAreaPosition::Bottom, 44);
            let mut chart = builder.build_cartesian_2d(0.0..right, 0.0..highest).map_err(failed)?;
            chart
                .configure_mesh()
                .x_labels(6)
                .x_label_formatter(&|x| format!("{x:.0}"))
                .y_label_formatter(&|y| format!("{y:.0}"))
                .x_desc(&self.across)
                .axis_style(NEUTRAL)
                .bold_line_style(NEUTRAL.mix(0.3))
                .light_line_style(TRANSPARENT)
                .label_style(text(12))
                .draw()
                .map_err(failed)?;
            for (index, (name, points)) in self.lines.iter().enumerate() {
                let colour = COLOURS[index % COLOURS.len()];
                let line = LineSeries::new(points.iter().copied(), colour.stroke_width(2));
                let drawn = chart.draw_series(line).map_err(failed)?;
                drawn.label(name).legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 10, y + 5)], colour.filled()));
                let dots = points.iter().map(|point| Circle::new(*point, 4, colour.filled()));
                chart.draw_series(dots).map_err(failed)?;
            }
            chart
                .configure_series_labels()
                .position(SeriesLabelPosition::UpperLeft)
                .label_font(text(13))
                .draw()
                .map_err(failed)?;
            area.present().map_err(failed)?;
        }
        Ok(svg)
    }
}

fn text(size: u32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&NEUTRAL)
}

/// plotters' errors borrow the picture.
fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("draw: {error}")
}
